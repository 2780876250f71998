// Sixteen floats at a time, as GCC/Clang vector extensions: one source for AVX-512, AVX2 and NEON.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HVec __attribute__((vector_size(2 * kLanes)));
typedef uint32_t UVec __attribute__((vector_size(4 * kLanes)));

inline Vec broadcast(float x) { return Vec{} + x; }
inline Vec load(const float* p) { Vec v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec select(IVec mask, Vec a, Vec b) { return mask ? a : b; }
template <class F> inline F max(F a, F b) { return a > b ? a : b; }

// The four bytes at p in every lane.
inline IVec broadcast_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return IVec{} + word;
}

// f over all lanes, in pairs, then pairs of pairs: lane i with lane i + 8, then i + 4 and so on. The
// vector is halved, since shuffles that are wider than a register are taken apart lane by lane.
template <int kCount = kLanes, class F, class V>
inline float reduce(V v, const F& f) {
  if constexpr (kCount == 2) {
    return f(float(v[0]), float(v[1]));
  } else {
    typedef float Half __attribute__((vector_size(2 * kCount)));
    Half low, high;
    std::memcpy(&low, &v, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
    return reduce<kCount / 2>(f(low, high), f);
  }
}

inline float sum(Vec v) { return reduce(v, [](auto a, auto b) { return a + b; }); }
inline float largest(Vec v) { return reduce(v, [](auto a, auto b) { return max(a, b); }); }

// exp(x) for x <= 0 to about 2 ulp: 2^n * e^r with |r| <= ln(2) / 2, and for e^r the polynomial of
// degree 5 with p(0) = 1 whose largest relative error, 9e-8, is smallest. For vectors of any width.
template <class F>
inline F exp_nonpositive(F x) {
  typedef decltype(x > x) I;
  x = max(x, F{} - 87.0f);
  const F magic = F{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const F shifted = x * 1.44269504f + magic;
  const F n = shifted - magic;
  const F r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  F p = F{} + 0.00829026382f;
  p = p * r + 0.0418981648f;
  p = p * r + 0.166676387f;
  p = p * r + 0.499991477f;
  p = p * r + 0.999999702f;
  p = p * r + 1.0f;
  return (F)((I)p + (((I)shifted - (I)magic) << 23));
}

inline Vec silu(Vec x) {
  // exp() here takes x <= 0: e^-|x| serves both signs.
  const Vec e = exp_nonpositive(select(x > 0.0f, -x, x));
  return x * select(x > 0.0f, broadcast(1.0f), e) / (1.0f + e);
}

// sum + a[2i] b[2i] + a[2i + 1] b[2i + 1] in lane i: the products of pairs of bfloat16, for vectors
// of any width.
template <class F, class I>
inline F dot_pairs(F sum, I a, I b) {
#if defined(__AVX512BF16__)
  return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  const I high = I{} + int32_t(0xffff0000);
  return (F)(a & high) * (F)(b & high) + ((F)(a << 16) * (F)(b << 16) + sum);
#endif
}

struct Float32 {
  typedef float Element;
  typedef float Stored;  // in the cache
  static float widen(float x) { return x; }
  static Vec widen(const float* p) { return load(p); }
  static float narrow(float x) { return x; }
  static void narrow(float* to, Vec v) { store(to, v); }
  // sum + products of the elements in each lane's word, for vectors of any width
  template <class F, class I> static F multiply_words(F sum, I a, I b) { return (F)a * (F)b + sum; }
  // As many words of the cache
  template <class I> static I load_words(const float* p) { I v; std::memcpy(&v, p, sizeof v); return v; }
};

struct BFloat16 {
  typedef uint16_t Element, Stored;
  static float widen(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  static Vec widen(const uint16_t* p) {
    HVec h;
    std::memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, UVec) << 16);
  }
  static uint16_t narrow(float x) {  // round to nearest even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  static void narrow(uint16_t* to, Vec v) {
#if defined(__AVX512BF16__)  // takes denormal numbers for 0
    const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(to, &h, sizeof h);
#else
    const UVec bits = (UVec)v, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const UVec nan = (UVec)(v != v);
    const HVec h = __builtin_convertvector((rounded & ~nan) | ((bits >> 16 | 0x40) & nan), HVec);
    std::memcpy(to, &h, sizeof h);
#endif
  }
  template <class F, class I> static F multiply_words(F sum, I a, I b) { return dot_pairs(sum, a, b); }
  template <class I> static I load_words(const uint16_t* p) { I v; std::memcpy(&v, p, sizeof v); return v; }
};

template <class T>
inline void widen_row(float* to, const typename T::Element* from, int size) {
  int d = 0;
  for (; d + kLanes <= size; d += kLanes) store(to + d, T::widen(from + d));
  for (; d < size; ++d) to[d] = T::widen(from[d]);
}

// to[d] = f(d) for all d: `vector` computes sixteen at once, `scalar` the rest.
template <class T, class Vector, class Scalar>
inline void narrow_row(typename T::Element* to, int size, const Vector& vector, const Scalar& scalar) {
  int d = 0;
  for (; d + kLanes <= size; d += kLanes) T::narrow(to + d, vector(d));
  for (; d < size; ++d) to[d] = T::narrow(scalar(d));
}

// The same for numbers that lie in memory.
template <class T>
inline void narrow_row(typename T::Element* to, const float* from, int size) {
  narrow_row<T>(to, size, [&](int d) { return load(from + d); }, [&](int d) { return from[d]; });
}

}  // namespace
