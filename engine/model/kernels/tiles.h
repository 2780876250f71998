// bfloat16 products in tiles: 16 rows by 32 inputs against 32 inputs by 16 outputs in one instruction.
//
// An AMX unit takes X in blocks and packed weights as they lie (see matmul.h). An output is the sum,
// in ascending order, of what each 32 inputs bring; within those even and odd inputs are summed apart.
// Other rows of a tile have no part in that, so a row is what it would be alone. Whether tiles are
// used depends on the machine and on the layer's width, never on the number of rows.
#pragma once

#include "vectors.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kTileRows16 = 16, kTileInputs = 32;

enum class TileUnit : int { kNone, kRefused, kHardware, kEmulated };

#if defined(SPECSERVE_EMULATE_TILES)

// The same operations in plain C++, so that layouts, sums and invariance are tested on any CPU.
class Tiles {
 public:
  explicit Tiles(int height) : height_(height) {}
  template <int kSum> void clear() { std::memset(sums_[kSum], 0, sizeof sums_[kSum]); }
  template <int kRows> void load_rows(const uint16_t* x) { rows_[kRows] = x; }
  template <int kWeights> void load_weights(const uint16_t* w) { weights_[kWeights] = w; }
  template <int kSum, int kRows, int kWeights> void multiply() {
    for (int r = 0; r < height_; ++r) {
      Vec even{}, odd{};
      for (int pair = 0; pair < kTileInputs / 2; ++pair) {
        const IVec x = broadcast_word(rows_[kRows] + r * kTileInputs + 2 * pair), high = IVec{} + int32_t(0xffff0000);
        IVec w;
        std::memcpy(&w, weights_[kWeights] + pair * 4 * kLanes, sizeof w);
        even = (Vec)(x << 16) * (Vec)(w << 16) + even;
        odd = (Vec)(x & high) * (Vec)(w & high) + odd;
      }
      sums_[kSum][r] += even + odd;
    }
  }
  template <int kSum> void store(Vec (*out)[2], int half) {
    for (int r = 0; r < height_; ++r) out[r][half] = sums_[kSum][r];
  }

 private:
  const int height_;
  const uint16_t *rows_[2], *weights_[2];
  Vec sums_[4][kTileRows16];
};

inline TileUnit tile_unit() { return TileUnit::kEmulated; }

#elif defined(__AMX_TILE__) && defined(__AMX_BF16__)

// Tiles 0 to 3 are sums, 4 and 5 rows of X, 6 and 7 weights.
class Tiles {
 public:
  explicit Tiles(int height) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) {
      shape.bytes[tile] = 64;
      shape.rows[tile] = uint8_t(tile < 6 ? height : kTileInputs / 2);
    }
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  // By name, since compilers' own functions do not take a template's numbers.
  template <int kSum> void clear() { asm volatile("tilezero %%tmm%c0" : : "i"(kSum)); }
  template <int kRows> void load_rows(const uint16_t* x) { load<4 + kRows>(x, 2 * kTileInputs); }
  template <int kWeights> void load_weights(const uint16_t* w) { load<6 + kWeights>(w, 8 * kLanes); }
  template <int kSum, int kRows, int kWeights> void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(4 + kRows), "i"(6 + kWeights));
  }
  template <int kSum> void store(Vec (*out)[2], int half) {
    float* to = reinterpret_cast<float*>(out) + half * kLanes;
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kSum), "r"(to), "r"(int64_t(8 * kLanes)) : "memory");
  }

 private:
  template <int kTile> static void load(const uint16_t* from, int64_t bytes_apart) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(bytes_apart) : "memory");
  }
};

// A process must ask the operating system for the registers, once, or the first use ends it.
inline TileUnit tile_unit() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted ? TileUnit::kHardware : TileUnit::kRefused;
}

#else

inline TileUnit tile_unit() { return TileUnit::kNone; }

#endif

#if defined(SPECSERVE_EMULATE_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__))

// One or two tiles of rows against the outputs of a block. `next`: weights that are needed soon.
template <bool kTwo>
inline void tiles_product(Tiles& tiles, Vec (*out)[2], Vec (*out2)[2], const uint16_t* x, const uint16_t* x2, int64_t step,
                          const uint16_t* w, int inputs, const uint16_t* next) {
  tiles.clear<0>();
  tiles.clear<1>();
  if constexpr (kTwo) {
    tiles.clear<2>();
    tiles.clear<3>();
  }
  constexpr int kWords = kTileInputs * 2 * kLanes;  // weights of one step
  for (int k = 0; k < inputs; k += kTileInputs, x += step, x2 += step, w += kWords) {
    if (next) {
#pragma GCC unroll 32
      for (int i = 0; i < kWords; i += 32) __builtin_prefetch(next + i, 0, 2);
      next += kWords;
    }
    tiles.load_rows<0>(x);
    tiles.load_weights<0>(w);
    tiles.load_weights<1>(w + 2 * kLanes);
    tiles.multiply<0, 0, 0>();
    tiles.multiply<1, 0, 1>();
    if constexpr (kTwo) {
      tiles.load_rows<1>(x2);
      tiles.multiply<2, 1, 0>();
      tiles.multiply<3, 1, 1>();
    }
  }
  tiles.store<0>(out, 0);
  tiles.store<1>(out, 1);
  if constexpr (kTwo) {
    tiles.store<2>(out2, 0);
    tiles.store<3>(out2, 1);
  }
}

// `multiply` of matmul.h in tiles. With more than 16 rows the last tile reaches back over rows that
// were computed already, so that all are of one height; those are not finished twice.
template <class Finish>
void multiply_in_tiles(const uint16_t* x, int rows, int inputs, const uint16_t* packed, int begin, int end,
                       const Finish& finish) {
  if (rows == 0) return;
  const int height = rows < kTileRows16 ? rows : kTileRows16, count = (rows + height - 1) / height;
  const int64_t block_size = int64_t(inputs) * 2 * kLanes, step = int64_t(rows) * kTileInputs;
  Tiles tiles(height);
  Vec sums[2][kTileRows16][2];
  for (int block = begin; block < end; ++block) {
    const uint16_t* w = packed + block * block_size;
    const auto start = [&](int tile) { return tile == count - 1 ? rows - height : tile * height; };
    for (int t = 0; t < count; t += 2) {
      const uint16_t* next = t == 0 && block + 1 < end ? w + block_size : nullptr;
      const uint16_t* first = x + int64_t(start(t)) * kTileInputs;
      if (t + 1 < count) {
        const uint16_t* second = x + int64_t(start(t + 1)) * kTileInputs;
        tiles_product<true>(tiles, sums[0], sums[1], first, second, step, w, inputs, next);
      } else {
        tiles_product<false>(tiles, sums[0], sums[1], first, first, step, w, inputs, next);
      }
      for (int i = 0; i < 2 && t + i < count; ++i)
        for (int row = (t + i) * height; row < rows && row < (t + i + 1) * height; ++row)
          finish(row, block, sums[i][row - start(t + i)]);
    }
  }
}

#define SPECSERVE_HAS_TILES 1
#endif

}  // namespace
