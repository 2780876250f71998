// Rows in few bits: what is multiplied with weights in few bits (see fewbit.h).
//
// A group of 32 neighbours shares one scale: its largest magnitude over the largest whole number,
// which is 32,512 in 16 bits and 127 in eight. 32,512 is 127 * 256: such a number is also two signed
// bytes, for instructions that multiply no more.
#pragma once

#include "integers.h"

namespace {

constexpr float kTooSmall = 1e-30f;  // groups of smaller numbers are taken for 0: their scale has no inverse

struct Wide {
  typedef int16_t Element;
  static constexpr int kLargest = 32512;
};

struct Narrow {
  typedef int8_t Element;
  static constexpr int kLargest = 127;
};

// Groups lie as inputs of dense products do: the first of all rows, then the second.
template <class A>
struct Group {
  // In order if wide; else each eight stand as weights do, in the words (0 4 1 5) and (2 6 3 7).
  typename A::Element values[kBlockInputs];
  float scale, sum;   // `sum` times `scale`: what a minimum of the weights is multiplied with
  int32_t halves[2];  // the sums of the first and the last sixteen values
};

static_assert(sizeof(Group<Wide>) == 80 && sizeof(Group<Narrow>) == 48, "mirrored by group_bytes in fewbit_linear.py");

inline int64_t group_bytes(int planes) { return planes == 1 ? sizeof(Group<Narrow>) : sizeof(Group<Wide>); }

inline void keep_values(Group<Wide>& group, int half, IVec values) {
  typedef int16_t Values __attribute__((vector_size(2 * kLanes)));
  const Values narrow = __builtin_convertvector(values, Values);
  std::memcpy(group.values + half * kLanes, &narrow, sizeof narrow);
}

inline void keep_values(Group<Narrow>& group, int half, IVec values) {
  typedef int8_t Values __attribute__((vector_size(kLanes)));
  const IVec order = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
  const Values narrow = __builtin_convertvector(__builtin_shuffle(values, order), Values);
  std::memcpy(group.values + half * kLanes, &narrow, sizeof narrow);
}

// Only products and what rounds by itself, so that no compiler can fuse anything.
template <class A>
inline void quantize_group(Group<A>& group, Vec first, Vec second) {
  const Vec magnitudes = max(select(first > 0.0f, first, -first), select(second > 0.0f, second, -second));
  // A maximum may pass over what is no number; a sum does not.
  const float poison = sum(first * 0.0f) + sum(second * 0.0f);
  const float most = poison == 0.0f ? largest(magnitudes) : poison;
  const bool zero = most < kTooSmall;
  const float inverse = zero ? 0.0f : A::kLargest / most;
  group.scale = zero ? 0.0f : most / A::kLargest;
  int32_t total = 0;
  const Vec parts[2] = {first, second};
  for (int half = 0; half < 2; ++half) {
    const IVec values = poison == 0.0f ? round_vec(parts[half] * inverse) : IVec{};
    keep_values(group, half, values);
    // Sums of so few small numbers are exact in float32, too.
    group.halves[half] = int32_t(sum(__builtin_convertvector(values, Vec)));
    total += group.halves[half];
  }
  group.sum = group.scale * float(total);
}

// One group of 32 numbers, at a place among groups of one or two planes.
inline void quantize(void* groups, int64_t place, int planes, Vec first, Vec second) {
  if (planes == 1) quantize_group(static_cast<Group<Narrow>*>(groups)[place], first, second);
  else quantize_group(static_cast<Group<Wide>*>(groups)[place], first, second);
}

}  // namespace
