// Y = X W^T for any number of rows, every row as if it were alone.
//
// An output element is one accumulator that runs through the K inputs in ascending order, in
// float32: the same chain of instructions for 1 row or 500. Weights are packed into blocks of 32
// outputs, so that a block is one contiguous stream: with few rows the speed is memory's. X lies in
// blocks, too: the first 32 inputs of all rows, then the next. What a thread computes for several
// rows it writes, and what a tile needs it reads, in one place.
#pragma once

#include "tiles.h"
#include "tuning.h"
#include "vectors.h"

namespace {

constexpr int kBlockOutputs = 2 * kLanes, kBlockInputs = kBlockOutputs;

// A vector as wide as a register: lanes are independent, so its width is no matter of numbers.
#if defined(__AVX512F__)
constexpr int kRegister = 16;
#elif defined(__AVX__)
constexpr int kRegister = 8;
#else
constexpr int kRegister = 4;
#endif
typedef float Reg __attribute__((vector_size(4 * kRegister)));
typedef int32_t IReg __attribute__((vector_size(4 * kRegister)));

// Rows whose accumulators fit into the registers, for all outputs of a block and for half of them.
#if defined(__AVX512F__)
constexpr int kWholeTile = 12, kMaxTile = 12;
#else
constexpr int kWholeTile = 3, kMaxTile = 6;
#endif

// Tiles take turns at so many inputs of a block, for that many weights stay in the first-level cache,
// and so do the sums of the tiles of a panel.
constexpr int kTurn = 2 * kBlockInputs, kPanelTiles = 96 / kMaxTile;

inline int num_blocks(int width) { return (width + kBlockOutputs - 1) / kBlockOutputs; }

// Where the element d of a row lies among `rows` rows in blocks.
inline int64_t block_place(int64_t row, int d, int rows) {
  return (int64_t(d / kBlockInputs) * rows + row) * kBlockInputs + d % kBlockInputs;
}

// Packed float32 weights of a block: [K][32].
struct Weights32 {
  typedef float Element;
  static constexpr int kInputsPerStep = 1;
  typedef Reg Words;
  static inline Words broadcast(const float* x) { return *x - Reg{}; }  // 0 + x is one more instruction
  static inline Reg multiply(Reg sum, Words x, Words w) { return x * w + sum; }
};

// Packed bfloat16 weights of a block: [K / 2][32][2]; a step takes two inputs.
struct Weights16 {
  typedef uint16_t Element;
  static constexpr int kInputsPerStep = 2;
  typedef IReg Words;
  static inline Words broadcast(const uint16_t* x) {
    int32_t word;
    std::memcpy(&word, x, 4);
    return IReg{} + word;
  }
  static inline Reg multiply(Reg sum, Words x, Words w) { return dot_pairs(sum, x, w); }
};

// kRows rows of X, of `rows`, against `outputs` outputs of a block of weights: adds what the inputs
// [begin, end) bring to sums. If told to, weights are fetched `ahead` of their use.
template <class W, int kRows, int kOutputs, bool kFetch>
inline void block_product(Vec (*out)[2], int first_vector, const typename W::Element* x, int rows,
                          const typename W::Element* w, int begin, int end, int64_t ahead) {
  constexpr int step = W::kInputsPerStep, regs = kOutputs / kRegister;
  Reg sums[kRows][regs];  // local, so that the compiler may keep it in registers
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < regs; ++i)
      std::memcpy(&sums[r][i], reinterpret_cast<const float*>(&out[r][first_vector]) + i * kRegister, sizeof(Reg));
  const int together = kRows == 1 && rows == 1 ? end : kBlockInputs;  // inputs of a row
  x += rows == 1 ? begin : int64_t(begin) * rows;
  w += int64_t(begin) * kBlockOutputs + first_vector * step * kLanes;
  for (int left = end - begin; left > 0; left -= together, x += int64_t(rows) * together) {
    const int count = left < together ? left : together;
    for (int k = 0; k < count; k += step, w += step * kBlockOutputs) {
      if constexpr (kFetch) {  // into the second-level cache: the first has no room for a block
#pragma GCC unroll 2
        for (int i = 0; i < kOutputs / kLanes; ++i) __builtin_prefetch(w + ahead + i * step * kLanes, 0, 2);
      }
      typename W::Words words[regs];
#pragma GCC unroll 16
      for (int i = 0; i < regs; ++i) std::memcpy(&words[i], w + i * step * kRegister, sizeof(Reg));
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const typename W::Words input = W::broadcast(x + r * kBlockInputs + k);
#pragma GCC unroll 16
        for (int i = 0; i < regs; ++i) sums[r][i] = W::multiply(sums[r][i], input, words[i]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < regs; ++i)
      std::memcpy(reinterpret_cast<float*>(&out[r][first_vector]) + i * kRegister, &sums[r][i], sizeof(Reg));
}

// The same for `count` rows, at most kMaxTile, and all outputs of the block.
template <class W, bool kFetch, int kRows = kMaxTile>
inline void tile_product(int count, Vec (*sums)[2], const typename W::Element* x, int rows,
                         const typename W::Element* w, int begin, int end, int64_t ahead) {
  if constexpr (kRows > 0) {
    if (count < kRows) return tile_product<W, kFetch, kRows - 1>(count, sums, x, rows, w, begin, end, ahead);
    if constexpr (kRows <= kWholeTile) {
      block_product<W, kRows, kBlockOutputs, kFetch>(sums, 0, x, rows, w, begin, end, ahead);
    } else {
      block_product<W, kRows, kLanes, kFetch>(sums, 0, x, rows, w, begin, end, ahead);
      block_product<W, kRows, kLanes, kFetch>(sums, 1, x, rows, w, begin, end, ahead);
    }
  }
}

// One thread's share [begin, end) of the blocks, for all rows of X: calls finish(row, block, sums[2]).
template <class W, class Finish>
void multiply(const typename W::Element* x, int rows, int inputs, const typename W::Element* packed,
              int begin, int end, const Finish& finish) {
#if defined(SPECSERVE_HAS_TILES)
  if constexpr (W::kInputsPerStep == 2)
    if (inputs % kTileInputs == 0 && tile_unit() != TileUnit::kRefused)
      return multiply_in_tiles(x, rows, inputs, packed, begin, end, finish);
#endif
  const int tiles = (rows + kMaxTile - 1) / kMaxTile, panels = (tiles + kPanelTiles - 1) / kPanelTiles;
  const int turn = rows <= kWholeTile ? inputs : kTurn;
  const int64_t block_size = int64_t(inputs) * kBlockOutputs;
  // Where several tiles use a block, memory would rest after the first: the last fetches the next block.
  const int64_t ahead = tiles > 1 ? block_size : tuning.dense_ahead * W::kInputsPerStep * kBlockOutputs;
  const auto first_row = [&](int tile) { return int(int64_t(rows) * tile / tiles); };  // of nearly equal tiles
  Vec sums[kPanelTiles * kMaxTile][2];
  for (int block = begin; block < end; ++block) {
    const auto* w = packed + block * block_size;
    for (int p = 0; p < panels; ++p) {
      const int from = int(int64_t(tiles) * p / panels), to = int(int64_t(tiles) * (p + 1) / panels);
      const int row0 = first_row(from), count = first_row(to) - row0;
      for (int r = 0; r < count; ++r) sums[r][0] = sums[r][1] = Vec{};
      for (int k = 0; k < inputs; k += turn) {
        const int stop = inputs - k < turn ? inputs : k + turn;
        for (int t = from; t < to; ++t) {
          const int first = first_row(t), height = first_row(t + 1) - first;
          const auto* own = x + int64_t(first) * kBlockInputs;
          const bool fetches = tiles > 1 ? t == tiles - 1 : rows >= tuning.dense_fetched;
          if (fetches) tile_product<W, true>(height, sums + first - row0, own, rows, w, k, stop, ahead);
          else tile_product<W, false>(height, sums + first - row0, own, rows, w, k, stop, ahead);
        }
      }
      for (int r = 0; r < count; ++r) finish(row0 + r, block, sums[r]);
    }
  }
}

}  // namespace
