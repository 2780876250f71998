// Y = X W^T with W in few bits and X in groups of few bits, every row as if it were alone.
//
// A group of inputs is multiplied in whole numbers, exactly; then its scales make a float32 of it,
// which is added to an accumulator that runs through the groups in ascending order. So the bits do
// not depend on how sums of whole numbers are split, and any instruction may compute them.
#pragma once

#include "quantized.h"

namespace {

constexpr int kSpan = 2 * kRegister;  // outputs that are computed at once
#if defined(__AVX512F__)
constexpr int kFewbitRows = 8;
#else
constexpr int kFewbitRows = 4;  // whose sums stay in registers
#endif

// Weights of 32 outputs and 32 inputs: w = scale * (q - kZero), plus a minimum if they have one.
//
// For each eight inputs there are two words an output, of their bytes (0 4 1 5) and (2 6 3 7). Signed
// bytes of all outputs lie word after word; of numbers of four bits the first word has the low halves
// of what is stored, and the second one the high ones. Scales follow, for each `kShared` inputs those
// of all outputs, and then minimums.
template <int kBitsOf, bool kMinimumOf, class ScaleOf, int kSharedOf, int kZeroOf>
struct Form {
  typedef ScaleOf Scale;
  static constexpr int kBits = kBitsOf, kShared = kSharedOf, kZero = kZeroOf;
  static constexpr bool kMinimum = kMinimumOf;
  static constexpr int kParts = kBlockInputs / kShared, kEight = kBits * kBlockOutputs;
  static constexpr int kScales = kEight * kBlockInputs / 8, kMinimums = kScales + kParts * kBlockOutputs * int(sizeof(Scale));
  static constexpr int kBytes = kMinimum ? 2 * kMinimums - kScales : kMinimums;

  // Both words of eight inputs.
  static inline void words(const uint8_t* w, IReg& first, IReg& second) {
    first = load_words(w);
    if constexpr (kBits == 4) {
      second = (first >> 4) & 0x0f0f0f0f;
      first &= 0x0f0f0f0f;
    } else {
      second = load_words(w + 4 * kBlockOutputs);
    }
  }
  static inline IReg even(IReg word) { return kBits == 4 ? even_unsigned(word) : even_signed(word); }
  static inline IReg odd(IReg word) { return kBits == 4 ? odd_unsigned(word) : odd_signed(word); }
  static inline const Scale* scale_of(const uint8_t* w, int part) {
    return reinterpret_cast<const Scale*>(w + kScales) + part * kBlockOutputs;
  }
  static inline const Scale* minimum_of(const uint8_t* w, int part) {
    return reinterpret_cast<const Scale*>(w + kMinimums) + part * kBlockOutputs;
  }
};

// Mirrored by `FORMS` in fewbit.py.
typedef Form<4, false, uint16_t, 32, 8> Nibbles;           // Q4_0
typedef Form<4, true, uint16_t, 32, 0> NibblesFrom;        // Q4_1
typedef Form<4, true, float, 32, 0> NibblesFromFine;       // Q4_K
typedef Form<8, false, uint16_t, 32, 0> Bytes;             // Q8_0, Q5_0
typedef Form<8, true, float, 32, 0> BytesFrom;             // Q5_1, Q5_K
typedef Form<8, false, float, 16, 0> BytesOfSixteen;       // Q6_K
typedef Form<8, true, float, 16, 0> BytesFromOfSixteen;    // several of them in one matrix

// The integer sums of kRows rows and two registers of outputs over `kShared` inputs.
template <class F, class A, int kRows>
struct Sums;

template <class F, int kRows>
struct Sums<F, Wide, kRows> {
  IReg sums[kRows][2];

  inline void clear(const Group<Wide>* x, int part) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const int32_t total = F::kParts == 2 ? x[r].halves[part] : x[r].halves[0] + x[r].halves[1];
      sums[r][0] = sums[r][1] = F::kZero ? IReg{} - F::kZero * total : IReg{};
    }
  }

  // Eight inputs.
  inline void add(const Group<Wide>* x, int first, const uint8_t* w) {
    IReg words[2][2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) F::words(w + 4 * i * kRegister, words[i][0], words[i][1]);
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      IReg halves[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) halves[i] = pair % 2 ? F::odd(words[i][pair / 2]) : F::even(words[i][pair / 2]);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const IReg input = repeat_word(x[r].values + first + pair % 2 * 4 + pair / 2 * 2);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) settle(sums[r][i] = dot_halves(sums[r][i], input, halves[i]));
      }
    }
  }

  inline IReg total(int row, int i) const { return sums[row][i]; }
};

template <class F, int kRows>
struct Sums<F, Narrow, kRows> {
#if defined(SPECSERVE_VNNI)
  // The instruction takes one factor without a sign: signed weights are raised by 128.
  static constexpr int kRaised = F::kBits == 8 ? 128 : 0;
  static constexpr bool kSplit = false;
#else
  static constexpr int kRaised = 0;
#if defined(SPECSERVE_INTEGERS) && defined(__SSSE3__)
  // 15 * 128 * 2 from each instruction and eight of them: 30,720 fit into 16 bits.
  static constexpr bool kSplit = F::kBits == 4;
#else
  static constexpr bool kSplit = false;
#endif
#endif
  IReg sums[kRows][2];
  int32_t less[kRows];

  inline void clear(const Group<Narrow>* x, int part) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const int32_t total = F::kParts == 2 ? x[r].halves[part] : x[r].halves[0] + x[r].halves[1];
      less[r] = (F::kZero + kRaised) * total;
      sums[r][0] = sums[r][1] = IReg{} - (kSplit ? 0 : less[r]);
    }
  }

  static inline IReg dot(IReg sum, IReg x, IReg w) {
#if defined(SPECSERVE_VNNI)
    return (IReg)SPECSERVE_VNNI(dpbusd)((Integers)sum, (Integers)w, (Integers)x);
#else
#if defined(SPECSERVE_INTEGERS) && defined(__SSSE3__)
    if constexpr (kSplit)
      return (IReg)((HReg)sum + (HReg)SPECSERVE_INTEGERS(maddubs_epi16)((Integers)w, (Integers)x));
#endif
    return dot_halves(dot_halves(sum, even_signed(x), F::even(w)), odd_signed(x), F::odd(w));
#endif
  }

  inline void add(const Group<Narrow>* x, int first, const uint8_t* w) {
    IReg words[2][2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) F::words(w + 4 * i * kRegister, words[i][0], words[i][1]);
#pragma GCC unroll 2
    for (int word = 0; word < 2; ++word) {
      if constexpr (kRaised != 0)
        for (int i = 0; i < 2; ++i) words[i][word] ^= int32_t(0x80808080);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const IReg input = repeat_word(x[r].values + first + 4 * word);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) settle(sums[r][i] = dot(sums[r][i], input, words[i][word]));
      }
    }
  }

  inline IReg total(int row, int i) const {
    if constexpr (kSplit) return dot_halves(IReg{} - less[row], sums[row][i], IReg{} + 0x00010001);
    return sums[row][i];
  }
};

// kRows rows, of `rows`, against a block of weights; these are fetched `ahead` bytes before their use.
template <class F, class A, int kRows>
void fewbit_tile(Vec (*out)[2], const void* groups, int64_t rows, const uint8_t* w, int count, int64_t ahead) {
  const auto* x = static_cast<const Group<A>*>(groups);
  for (int r = 0; r < kRows; ++r) out[r][0] = out[r][1] = Vec{};
  for (int g = 0; g < count; ++g, x += rows, w += F::kBytes) {
    for (int line = 0; line < F::kBytes; line += 64) __builtin_prefetch(w + ahead + line, 0, 3);
    for (int at = 0; at < kBlockOutputs; at += kSpan) {
      for (int part = 0; part < F::kParts; ++part) {
        Sums<F, A, kRows> sums;
        sums.clear(x, part);
#pragma GCC unroll 4
        for (int k = 0; k < F::kShared; k += 8) {
          const int first = part * F::kShared + k;
          sums.add(x, first, w + first / 8 * F::kEight + 4 * at);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          const int output = at + i * kRegister;
          const Reg scale = widen_reg(F::scale_of(w, part) + output);
          Reg minimum{};
          if constexpr (F::kMinimum) minimum = widen_reg(F::minimum_of(w, part) + output);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            float* place = reinterpret_cast<float*>(out[r]) + output;
            Reg sum = fused(scale * x[r].scale, __builtin_convertvector(sums.total(r, i), Reg), widen_reg(place));
            if constexpr (F::kMinimum) {
              const float inputs = F::kParts == 1 ? x[r].sum : x[r].scale * float(x[r].halves[part]);
              sum = fused(minimum, Reg{} + inputs, sum);
            }
            std::memcpy(place, &sum, sizeof sum);
          }
        }
      }
    }
  }
}

typedef void (*FewbitTile)(Vec (*)[2], const void*, int64_t, const uint8_t*, int, int64_t);

// 32 weights of one output, as float32.
template <class F>
void widen_weights(float* to, const uint8_t* w, int output) {
  for (int k = 0; k < kBlockInputs; ++k) {
    constexpr int places[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // of eight inputs in their words
    const int place = places[k % 8], part = k / F::kShared;
    const uint8_t* byte = w + k / 8 * F::kEight + 4 * output + place % 4;
    const int q = F::kBits == 4 ? (*byte >> (place / 4 * 4) & 15) - F::kZero : int8_t(byte[place / 4 * 4 * kBlockOutputs]);
    const int lane = output % kRegister, first = output - lane;
    const float scale = widen_reg(F::scale_of(w, part) + first)[lane];
    const float minimum = F::kMinimum ? widen_reg(F::minimum_of(w, part) + first)[lane] : 0.0f;
    to[k] = __builtin_fmaf(scale, float(q), minimum);
  }
}

// What is known of a form when a pass runs.
struct Kernels {
  int64_t bytes;  // of 32 outputs and 32 inputs
  FewbitTile tiles[2][kFewbitRows];  // of one and two planes
  void (*widen)(float*, const uint8_t*, int);
};

template <class F, int... r>
constexpr Kernels kernels_of(std::integer_sequence<int, r...>) {
  return {F::kBytes, {{fewbit_tile<F, Narrow, r + 1>...}, {fewbit_tile<F, Wide, r + 1>...}}, widen_weights<F>};
}

constexpr int kDense = 0;  // weights in float32 or bfloat16; the other forms follow

template <class... F>
struct Forms {
  static constexpr Kernels all[] = {kernels_of<F>(std::make_integer_sequence<int, kFewbitRows>())...};
};

inline const Kernels& kernels_for(int form) {
  return Forms<Nibbles, NibblesFrom, NibblesFromFine, Bytes, BytesFrom, BytesOfSixteen, BytesFromOfSixteen>::all[form - 1];
}

// 32 weights of an output, the block-th of its inputs.
inline void widen_fewbit(int form, const void* packed, int inputs, int64_t output, int block, float* to) {
  const Kernels& kernels = kernels_for(form);
  const int64_t place = output / kBlockOutputs * (inputs / kBlockInputs) + block;
  kernels.widen(to, static_cast<const uint8_t*>(packed) + place * kernels.bytes, int(output % kBlockOutputs));
}

// One thread's share [begin, end) of the blocks, for all rows: calls finish(row, block, sums[2]).
template <class Finish>
void multiply_fewbit(int form, int planes, const void* groups, int rows, int inputs, const void* packed, int begin,
                     int end, const Finish& finish) {
  const Kernels& kernels = kernels_for(form);
  const int most = tuning.fewbit_rows > 0 && tuning.fewbit_rows < kFewbitRows ? tuning.fewbit_rows : kFewbitRows;
  const int count = inputs / kBlockInputs, tiles = (rows + most - 1) / most;
  const int64_t block_size = count * kernels.bytes, stride = group_bytes(planes);
  const auto* w = static_cast<const uint8_t*>(packed) + begin * block_size;
  Vec sums[kFewbitRows][2];
  for (int block = begin; block < end; ++block, w += block_size)
    for (int t = 0; t < tiles; ++t) {
      const int first = int(int64_t(rows) * t / tiles), height = int(int64_t(rows) * (t + 1) / tiles) - first;
      // Where several tiles use a block, memory would rest after the first: the last fetches the next block.
      const int64_t ahead = tiles == 1 ? tuning.fewbit_ahead * kernels.bytes : t == tiles - 1 ? block_size : 0;
      const auto* own = static_cast<const char*>(groups) + first * stride;
      kernels.tiles[planes - 1][height - 1](sums, own, rows, w, count, ahead);
      for (int r = 0; r < height; ++r) finish(first + r, block, sums[r]);
    }
}

}  // namespace
