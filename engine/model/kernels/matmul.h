// Y = X W^T for any number of rows, every row as if it were alone.
//
// An output element is one accumulator that runs through the K inputs in ascending order, in
// float32: the same chain of instructions for 1 row or 500. Weights are packed into blocks of 32
// outputs, so that a block is one contiguous stream: with few rows the speed is memory's. X lies in
// blocks, too: the first 32 inputs of all rows, then the next. What a thread computes for several
// rows it writes, and what a tile needs it reads, in one place.
#pragma once

#include "vectors.h"

namespace {

constexpr int kBlockOutputs = 2 * kLanes, kBlockInputs = kBlockOutputs;
constexpr int kMaxTile = 12;  // rows whose accumulators fit into the registers

// A single tile of so many rows computes for so long that the processor does not look far enough
// ahead by itself; it is told this many steps before. With fewer rows that only gets in the way.
constexpr int kFetchingRows = 7, kFetchedSteps = 48;

inline int num_blocks(int width) { return (width + kBlockOutputs - 1) / kBlockOutputs; }

// Where the element d of a row lies among `rows` rows in blocks.
inline int64_t block_place(int64_t row, int d, int rows) {
  return (int64_t(d / kBlockInputs) * rows + row) * kBlockInputs + d % kBlockInputs;
}

// Packed float32 weights of a block: [K][32].
struct Weights32 {
  typedef float Element;
  static constexpr int kInputsPerStep = 1;
  static inline Vec multiply(Vec sum, const float* x, const float* w) { return *x * load(w) + sum; }
};

// Packed bfloat16 weights of a block: [K / 2][32][2]; a step takes two inputs.
struct Weights16 {
  typedef uint16_t Element;
  static constexpr int kInputsPerStep = 2;
  static inline Vec multiply(Vec sum, const uint16_t* x, const uint16_t* w) {
    IVec pairs;
    std::memcpy(&pairs, w, sizeof pairs);
    return dot_pairs(sum, broadcast_word(x), pairs);
  }
};

// kRows rows of X, of `rows`, against one block of weights; if told to, weights are fetched `ahead`
// of their use.
template <class W, int kRows, bool kFetch>
inline void block_product(Vec (&out)[kRows][2], const typename W::Element* x, int rows,
                          const typename W::Element* w, int inputs, int64_t ahead) {
  constexpr int step = W::kInputsPerStep;
  Vec sums[kRows][2];  // local, so that the compiler may keep it in registers
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = Vec{};
  const int together = kRows == 1 && rows == 1 ? inputs : kBlockInputs;  // inputs of a row
  for (int left = inputs; left > 0; left -= together, x += int64_t(rows) * together) {
    const int count = left < together ? left : together;
    for (int k = 0; k < count; k += step, w += step * kBlockOutputs) {
      if constexpr (kFetch) {  // into the second-level cache: the first has no room for a block
        __builtin_prefetch(w + ahead, 0, 2);
        __builtin_prefetch(w + ahead + step * kLanes, 0, 2);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sums[r][0] = W::multiply(sums[r][0], x + r * kBlockInputs + k, w);
        sums[r][1] = W::multiply(sums[r][1], x + r * kBlockInputs + k, w + step * kLanes);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    out[r][0] = sums[r][0];
    out[r][1] = sums[r][1];
  }
}

// Calls finish(row, sums[2]) for rows [first, first + count) of one block; count <= kMaxTile.
template <class W, bool kFetch, class Finish, int kRows = kMaxTile>
inline void tile_product(int count, int first, const typename W::Element* x, int rows,
                         const typename W::Element* w, int inputs, int64_t ahead, const Finish& finish) {
  if constexpr (kRows > 0) {
    if (count < kRows)
      return tile_product<W, kFetch, Finish, kRows - 1>(count, first, x, rows, w, inputs, ahead, finish);
    Vec sums[kRows][2];
    block_product<W, kRows, kFetch>(sums, x + first * kBlockInputs, rows, w, inputs, ahead);
    for (int r = 0; r < kRows; ++r) finish(first + r, sums[r]);
  }
}

// One thread's share [begin, end) of the blocks, for all rows of X.
template <class W, class Finish>
void multiply(const typename W::Element* x, int rows, int inputs, const typename W::Element* packed,
              int begin, int end, const Finish& finish) {
  const int tiles = (rows + kMaxTile - 1) / kMaxTile;
  const int64_t block_size = int64_t(inputs) * kBlockOutputs;
  // Where several tiles use a block, memory would rest after the first: the last fetches the next block.
  const int64_t ahead = tiles > 1 ? block_size : kFetchedSteps * W::kInputsPerStep * kBlockOutputs;
  for (int block = begin; block < end; ++block) {
    const auto* w = packed + block * block_size;
    const auto put = [&](int row, const Vec* sums) { finish(row, block, sums); };
    for (int t = 0; t < tiles; ++t) {  // tiles of nearly equal height
      const int first = int(int64_t(rows) * t / tiles), last = int(int64_t(rows) * (t + 1) / tiles);
      const bool fetches = tiles > 1 ? t == tiles - 1 : rows >= kFetchingRows;
      if (fetches) tile_product<W, true>(last - first, first, x, rows, w, inputs, ahead, put);
      else tile_product<W, false>(last - first, first, x, rows, w, inputs, ahead, put);
    }
  }
}

}  // namespace
