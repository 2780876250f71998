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
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

// The four bytes at p in every lane.
inline IVec broadcast_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return IVec{} + word;
}

// f over all lanes, in pairs, then pairs of pairs.
template <class F>
inline float reduce(Vec v, const F& f) {
  const IVec swap8 = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
  const IVec swap4 = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
  const IVec swap2 = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
  const IVec swap1 = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
  v = f(v, __builtin_shuffle(v, swap8));
  v = f(v, __builtin_shuffle(v, swap4));
  v = f(v, __builtin_shuffle(v, swap2));
  return f(v, __builtin_shuffle(v, swap1))[0];
}

inline float sum(Vec v) { return reduce(v, [](Vec a, Vec b) { return a + b; }); }
inline float largest(Vec v) { return reduce(v, [](Vec a, Vec b) { return max(a, b); }); }

// exp(x) for x <= 0 to about 2 ulp: 2^n * e^r with |r| <= ln(2) / 2, and for e^r the polynomial of
// degree 5 with p(0) = 1 whose largest relative error, 9e-8, is smallest.
// For vectors of any width.
template <class V>
inline V exp_nonpositive(V x) {
  typedef decltype(V{} > V{}) I;
  const V lowest = V{} - 87.0f, magic = V{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = x > lowest ? x : lowest;
  const V shifted = x * 1.44269504f + magic;
  const V n = shifted - magic;
  const V r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  V p = V{} + 0.00829026382f;
  p = p * r + 0.0418981648f;
  p = p * r + 0.166676387f;
  p = p * r + 0.499991477f;
  p = p * r + 0.999999702f;
  p = p * r + 1.0f;
  return (V)((I)p + (((I)shifted - (I)magic) << 23));
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
  template <class V>
  static void narrow(float* to, const V& v) { std::memcpy(to, &v, sizeof v); }
  // sum + products of the elements in each lane's word
  template <class V, class I>
  static V multiply_words(V sum, I a, I b) { return (V)a * (V)b + sum; }
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
  template <class V>
  static void narrow(uint16_t* to, const V& v) {
#if defined(__AVX512BF16__)  // takes denormal numbers for 0
    const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
    typedef decltype(v != v) Bits;
    typedef uint16_t Halves __attribute__((vector_size(sizeof(V) / 2)));
    const Bits bits = (Bits)v, nan = v != v;
    const Bits rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Halves h = __builtin_convertvector((rounded & ~nan) | ((bits >> 16 | 0x40) & nan), Halves);
#endif
    std::memcpy(to, &h, sizeof h);
  }
  template <class V, class I>
  static V multiply_words(V sum, I a, I b) { return dot_pairs(sum, a, b); }
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
