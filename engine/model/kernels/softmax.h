// The softmax of attention, a block of keys at a time: what a row has seen so far, and what the next
// block's scores make of it.
#pragma once

#include "pages.h"

namespace {

// What the query rows of a tile know of the keys seen so far.
struct Softmax {
  float max[kTileRows];
  Vec sum[kTileRows];
};

// Hides what a row does not see of a block: it sees positions [begin, last]. Returns its best score.
inline float best_score(float* row, float best, int first, int begin, int last) {
  IReg lane;
  for (int i = 0; i < kRegister; ++i) lane[i] = i;
  Reg most = Reg{} + best;
  const bool all = first >= begin && first + kBlock - 1 <= last;
  for (int i = 0; i < kBlock; i += kRegister) {
    Reg scores = widen_reg(row + i);
    if (!all) {
      const IReg position = lane + (first + i);
      const Reg hidden = Reg{} - std::numeric_limits<float>::infinity();
      scores = (position >= begin) & (position <= last) ? scores : hidden;
      std::memcpy(row + i, &scores, sizeof scores);
    }
    most = scores > most ? scores : most;
  }
  float all_lanes[kRegister];
  std::memcpy(all_lanes, &most, sizeof most);
  for (int width = kRegister / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) all_lanes[i] = all_lanes[i] > all_lanes[i + width] ? all_lanes[i] : all_lanes[i + width];
  return all_lanes[0];
}

// Turns the rows' scores of a block into weights of its parts' values. factors: by what was summed
// before must shrink.
template <class T>
inline void weigh(typename T::Element* weights, Softmax& state, float* factors, const float* scores, const float* best,
                  const Part<T>* parts, int begin, int end) {
  const Reg lowest = Reg{} - std::numeric_limits<float>::infinity();
  for (int r = 0; r < kTileRows; r += kRegister) {
    const Reg factor = exp_nonpositive(widen_reg(state.max + r) - widen_reg(best + r));
    std::memcpy(factors + r, &factor, sizeof factor);
  }
  for (int r = begin; r < end; ++r) {
    state.max[r] = best[r];
    float* const sums = reinterpret_cast<float*>(&state.sum[r]);
    for (int lane = 0; lane < kLanes; lane += kRegister) {
      Reg sum = widen_reg(sums + lane) * factors[r];
      for (int i = lane; i < kBlock; i += kLanes) {
        const Reg score = widen_reg(scores + r * kBlock + i);
        Reg weight = score > lowest ? exp_nonpositive(score - best[r]) : Reg{};
        sum += weight;
        if constexpr (kScaleBytes<T> != 0)
          weight = score > lowest ? weight * load_scales(parts[i / kLanes].value_scales + lane * kScaleBytes<T>) : Reg{};
        T::narrow(weights + r * kBlock + i, weight);
      }
      std::memcpy(sums + lane, &sum, sizeof sum);
    }
  }
}

}  // namespace
