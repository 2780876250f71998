// Whole numbers a register at a time: the products of small ones, and the ways from and to floats
// whose results are the same bits on every instruction set.
#pragma once

#include "matmul.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

typedef int16_t HReg __attribute__((vector_size(4 * kRegister)));
typedef uint16_t UHReg __attribute__((vector_size(4 * kRegister)));

// Vectors whose integer instructions are as wide as their floats': not so in AVX without AVX2.
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define SPECSERVE_INTEGERS(name) _mm512_##name
typedef __m512i Integers;
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define SPECSERVE_INTEGERS(name) _mm256_##name
typedef __m256i Integers;
#elif defined(__SSE2__) && !defined(__AVX__)
#define SPECSERVE_INTEGERS(name) _mm_##name
typedef __m128i Integers;
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define SPECSERVE_VNNI(name) _mm512_##name##_epi32
#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(__AVX512F__)
#define SPECSERVE_VNNI(name) _mm256_##name##_avx_epi32
#endif

inline IReg load_words(const uint8_t* p) { IReg v; std::memcpy(&v, p, sizeof v); return v; }

// The four bytes at p in every lane.
inline IReg repeat_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return IReg{} + word;
}

// The bytes 0 and 2 of each lane, or 1 and 3, as two numbers of 16 bits.
inline IReg even_unsigned(IReg v) { return v & 0x00ff00ff; }
inline IReg odd_unsigned(IReg v) { return (IReg)((UHReg)v >> 8); }
inline IReg even_signed(IReg v) { return (IReg)((HReg)((UHReg)v << 8) >> 8); }
inline IReg odd_signed(IReg v) { return (IReg)((HReg)v >> 8); }

// Keeps a sum where it is: compilers put off additions of whole numbers, until registers run out.
template <class V>
inline void settle(V& sum) {
#if defined(__x86_64__)
  if constexpr (sizeof(V) == 4 * kRegister) asm("" : "+x"(sum));
#endif
}

// sum + x[2i] w[2i] + x[2i + 1] w[2i + 1] of signed 16 bits in lane i: exact, as long as sums fit.
inline IReg dot_halves(IReg sum, IReg x, IReg w) {
#if defined(SPECSERVE_VNNI)
  return (IReg)SPECSERVE_VNNI(dpwssd)((Integers)sum, (Integers)x, (Integers)w);
#elif defined(SPECSERVE_INTEGERS)
  return sum + (IReg)SPECSERVE_INTEGERS(madd_epi16)((Integers)x, (Integers)w);
#else
  return sum + ((x << 16) >> 16) * ((w << 16) >> 16) + (x >> 16) * (w >> 16);
#endif
}

// a * b + c, rounded once, also where the CPU has no such instruction.
inline Reg fused(Reg a, Reg b, Reg c) {
#if defined(__AVX512F__)
  return (Reg)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (Reg)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int i = 0; i < kRegister; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// Numbers that lie in memory, as float32.
inline Reg widen_reg(const float* p) { Reg v; std::memcpy(&v, p, sizeof v); return v; }
inline Reg widen_reg(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Reg)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX__) && defined(__F16C__)
  return (Reg)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Reg v;
  for (int i = 0; i < kRegister; ++i) {
    const uint32_t magnitude = uint32_t(p[i] & 0x7fff) << 13, sign = uint32_t(p[i] & 0x8000) << 16;
    float f;
    std::memcpy(&f, &magnitude, 4);
    f *= 0x1p112f;  // moves the exponent, and makes a denormal number a normal one
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    bits |= sign | (magnitude >= 0x0f800000 ? 0x7f800000 : 0);  // what is no finite number stays none
    std::memcpy(&f, &bits, 4);
    v[i] = f;
  }
  return v;
#endif
}

// The nearest whole number, the even one of two; numbers that no int32 is near come out as any.
inline IReg round_reg(Reg v) {
#if defined(__AVX512F__)
  return (IReg)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX__)
  return (IReg)_mm256_cvtps_epi32((__m256)v);
#elif defined(__SSE2__)
  return (IReg)_mm_cvtps_epi32((__m128)v);
#else
  IReg n;
  for (int i = 0; i < kRegister; ++i) n[i] = int32_t(__builtin_rintf(v[i]));
  return n;
#endif
}

inline IVec round_vec(Vec v) {
  IVec n;
  for (int i = 0; i < kLanes / kRegister; ++i) {
    Reg part;
    std::memcpy(&part, reinterpret_cast<const char*>(&v) + i * sizeof part, sizeof part);
    const IReg whole = round_reg(part);
    std::memcpy(reinterpret_cast<char*>(&n) + i * sizeof whole, &whole, sizeof whole);
  }
  return n;
}

}  // namespace
