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

// The same for sixteen elements and their partners. Not inlined: next to other code the compiler may
// fuse other products with the sums, and a row's numbers would depend on how many rows there are.
__attribute__((noinline)) void rotate_pair(Vec& first, Vec& second, const float* cosines, const float* sines, int half) {
  const Vec a = first, b = second;
  first = a * load(cosines) - b * load(sines);
  second = b * load(cosines + half) + a * load(sines + half);
}

}  // namespace
