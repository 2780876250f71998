// Keys and values in eight bits: whole numbers up to 127, and one scale for each key and value.
//
// What is computed with them is float32, and the scales are left out until the last moment: a score
// is multiplied with that of its key, a weight with that of its value. Scales are bfloat16, rounded
// up, and lie behind a page's elements, token after token.
#pragma once

#include "integers.h"

namespace {

struct Int8 : Float32 {
  typedef int8_t Stored;
};

// Bytes of a key's or value's scale: none but in eight bits.
template <class T>
constexpr int kScaleBytes = 0;
template <>
constexpr int kScaleBytes<Int8> = 2;

// A register of signed bytes.
inline IReg widen_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return (IReg)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (IReg)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  IReg words;
  for (int i = 0; i < kRegister; ++i) words[i] = p[i];
  return words;
#endif
}

// A register of words of the cache, as they are multiplied.
template <class T>
inline IReg load_words(const typename T::Stored* p) {
  if constexpr (kScaleBytes<T> != 0) {
    return (IReg)__builtin_convertvector(widen_bytes(p), Reg);
  } else {
    IReg words;
    std::memcpy(&words, p, sizeof words);
    return words;
  }
}

// A register of scales of tokens; those that nobody wrote may be anything.
inline Reg load_scales(const int8_t* p) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kRegister)));
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  return (Reg)(__builtin_convertvector(halves, IReg) << 16);
}

// Rounds the `size` elements of a key or value to whole numbers that lie `stride` apart.
inline void round_head(const float* x, int size, int8_t* to, int64_t stride, int8_t* scale) {
  float most = 0.0f, poison = 0.0f;  // a maximum may pass over what is no number; a sum does not
  for (int d = 0; d < size; ++d) {
    const float magnitude = x[d] < 0.0f ? -x[d] : x[d];
    most = magnitude > most ? magnitude : most;
    poison += x[d] * 0.0f;
  }
  float step = (poison == 0.0f ? most : poison) / 127.0f;
  uint32_t bits;
  std::memcpy(&bits, &step, 4);
  const uint16_t rounded = step == step ? uint16_t((bits + 0xffff) >> 16) : 0x7fc0;
  std::memcpy(scale, &rounded, 2);
  step = BFloat16::widen(rounded);
  // Of smaller numbers the inverse is none; they are taken for 0.
  const float inverse = step >= 1e-30f ? 1.0f / step : 0.0f;
  for (int d = 0; d < size; ++d) to[d * stride] = poison == 0.0f ? int8_t(std::nearbyintf(x[d] * inverse)) : 0;
}

}  // namespace
