// Rotary embedding: an element of the first half of a head turns with its partner in the second.
#pragma once

#include "vectors.h"

namespace {

// 1 / sqrt(mean(x^2) + epsilon), summed in one fixed order.
inline float inverse_rms(const float* x, int size, float epsilon) {
  Vec squares = Vec{};
  int d = 0;
  for (; d + kLanes <= size; d += kLanes) squares += load(x + d) * load(x + d);
  float total = sum(squares);
  for (; d < size; ++d) total += x[d] * x[d];
  return 1.0f / std::sqrt(total / size + epsilon);
}

// Norms one head if the model does, rotates it: x cos + rotate_half(x) sin.
inline void rotate(float* x, const float* norm, const float* cosines, const float* sines, int size, float epsilon) {
  if (norm) {
    const float factor = inverse_rms(x, size, epsilon);
    for (int d = 0; d < size; ++d) x[d] *= factor * norm[d];
  }
  const int half = size / 2;
  int d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    const Vec a = load(x + d), b = load(x + d + half);
    store(x + d, a * load(cosines + d) - b * load(sines + d));
    store(x + d + half, b * load(cosines + d + half) + a * load(sines + d + half));
  }
  for (; d < half; ++d) {
    const float a = x[d], b = x[d + half];
    x[d] = a * cosines[d] - b * sines[d];
    x[d + half] = b * cosines[d + half] + a * sines[d + half];
  }
}

// The same for sixteen elements and their partners. Which product is fused with the sum is said, or
// the function not inlined: else the compiler may choose otherwise next to other code, and a row's
// numbers would depend on how many rows there are.
#if defined(__AVX512BF16__)
inline void rotate_pair(Vec& first, Vec& second, const float* cosines, const float* sines, int half) {
  const __m512 a = (__m512)first, b = (__m512)second;
  const Vec from_second = second * load(sines), from_first = first * load(sines + half);
  first = (Vec)_mm512_fmsub_ps(a, (__m512)load(cosines), (__m512)from_second);
  second = (Vec)_mm512_fmadd_ps(b, (__m512)load(cosines + half), (__m512)from_first);
}
#else
__attribute__((noinline)) void rotate_pair(Vec& first, Vec& second, const float* cosines, const float* sines, int half) {
  const Vec a = first, b = second;
  first = a * load(cosines) - b * load(sines);
  second = b * load(cosines + half) + a * load(sines + half);
}
#endif

}  // namespace
