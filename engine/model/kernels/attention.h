// Paged attention for CPUs: reads K/V pages in place, any number of query rows per sequence.
//
// Row-count invariance is the point of this file. Everything done for a query row depends only
// on the row itself, its position and its keys: keys are visited in blocks aligned to absolute
// positions, in ascending order, with one fixed arithmetic per (row, key). Which rows share a
// tile, how a prompt was cut into chunks, how large pages are, which branches a draft has besides
// the row's own and how many threads run changes which loop computes a number, never the number.
#pragma once

#include <cmath>
#include <type_traits>

#include "matmul.h"
#include "softmax.h"

namespace {

// Heads are padded to whole bfloat16 vectors, with zeros.
inline int padded_size(int size) { return (size + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

// Working memory of one thread.
template <class T>
struct Scratch {
  typedef typename T::Element Element;
  std::vector<Element> heads;  // queries, and parts put together from small pages
  std::vector<float> sums;
  explicit Scratch(int padded)
      : heads(size_t(padded) * (2 * kBlock + kTileRows) + 4 * kLanes), sums(size_t(padded) * kTileRows) {}
};

// Registers that sixteen lanes fill, and whether there are enough of them for large tiles of sums.
constexpr int kRegs = kLanes / kRegister;
#if defined(__AVX512F__)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

// Scores of kRows query rows against the keys of kParts parts. A score is one accumulator that runs
// through the words in ascending order.
template <class T, int kRows, int kParts>
inline void score_parts(float* scores, const typename T::Element* queries, const Part<T>* parts, int size, float scale) {
  constexpr int regs = kParts * kRegs, w = kPerWord<T>;
  Reg sums[kRows][regs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < regs; ++i) sums[r][i] = Reg{};
  for (int d = 0; d < size; d += w) {
    IReg keys[regs];
#pragma GCC unroll 8
    for (int i = 0; i < regs; ++i) {
      const Part<T>& part = parts[i / kRegs];
      keys[i] = load_words<T>(part.keys + int64_t(d) * part.stride + i % kRegs * kRegister * w);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const IReg query = repeat_word(queries + r * size + d);
#pragma GCC unroll 8
      for (int i = 0; i < regs; ++i) sums[r][i] = T::multiply_words(sums[r][i], query, keys[i]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < regs; ++i) {
    Reg factor = Reg{} + scale;
    if constexpr (kScaleBytes<T> != 0)
      factor *= load_scales(parts[i / kRegs].key_scales + i % kRegs * kRegister * kScaleBytes<T>);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Reg score = sums[r][i] * factor;
      std::memcpy(scores + r * kBlock + i * kRegister, &score, sizeof score);
    }
  }
}

// The same against a block's keys.
template <class T, int kRows>
inline void score_rows(float* scores, const typename T::Element* queries, const Part<T>* parts, int size, float scale) {
  if constexpr (kManyRegisters || kRows <= 2) {
    score_parts<T, kRows, 2>(scores, queries, parts, size, scale);
  } else {
    score_parts<T, kRows, 1>(scores, queries, parts, size, scale);
    score_parts<T, kRows, 1>(scores + kLanes, queries, parts + 1, size, scale);
  }
}

// output = output * factor + weights * values of the block's tokens [from, to], for kRows rows and
// kCount registers of a head. A word takes in the token before `from`, and after `to`, whose weights
// are 0; what stands there after `to` may be anything.
template <class T, int kRows, int kCount>
inline void add_values(float* output, int padded, const float* factors, const typename T::Element* weights,
                       const Part<T>* parts, int size, int from, int to, int d) {
  constexpr int w = kPerWord<T>;
  Reg sums[kRows][kCount];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kCount; ++v) sums[r][v] = widen_reg(output + r * padded + d + v * kRegister) * factors[r];
  const auto step = [&](int j, int32_t kept) __attribute__((always_inline)) {
    const auto* words = parts[j / kLanes].values + int64_t(j % kLanes) * size + d * w;
    IReg values[kCount];
#pragma GCC unroll 4
    for (int v = 0; v < kCount; ++v) {
      values[v] = load_words<T>(words + v * kRegister * w);
      if (kept != -1) values[v] &= kept;
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const IReg weight = repeat_word(weights + r * kBlock + j);
#pragma GCC unroll 4
      for (int v = 0; v < kCount; ++v) sums[r][v] = T::multiply_words(sums[r][v], weight, values[v]);
    }
  };
  int j = from / w * w;
  for (; j + w - 1 <= to; j += w) step(j, -1);
  if (j <= to) step(j, 0xffff);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kCount; ++v) std::memcpy(output + r * padded + d + v * kRegister, &sums[r][v], sizeof(Reg));
}

template <class T, int kRows>
inline void add_values(float* output, int padded, const float* factors, const typename T::Element* weights,
                       const Part<T>* parts, int size, int from, int to) {
  constexpr int count = kManyRegisters || kRows <= 2 ? 4 : 2;  // registers at a time
  int d = 0;
  for (; d + count * kRegister <= padded; d += count * kRegister)
    add_values<T, kRows, count>(output, padded, factors, weights, parts, size, from, to, d);
  if (d < padded) add_values<T, kRows, 2>(output, padded, factors, weights, parts, size, from, to, d);
}

// Calls f with the largest supported number of rows up to `rows`, as a constant; returns it.
template <class F>
inline int by_rows(int rows, const F& f) {
  if (rows >= 4) return f(std::integral_constant<int, 4>()), 4;
  if (rows == 3) return f(std::integral_constant<int, 3>()), 3;
  if (rows == 2) return f(std::integral_constant<int, 2>()), 2;
  return f(std::integral_constant<int, 1>()), 1;
}

// Elements [begin, begin + size) of a row of the output: `from` times a factor.
template <class T>
inline void write_output(const Attention& a, int row, int begin, int size, const float* from, float factor) {
  auto* const output = static_cast<typename T::Element*>(a.output);
  const auto place = [&](int d) {
    return a.output_rows ? block_place(row, begin + d, a.output_rows) : int64_t(row) * a.heads * size + begin + d;
  };
  if (begin % kLanes == 0 && size % kLanes == 0) {
    for (int d = 0; d < size; d += kLanes) T::narrow(output + place(d), load(from + d) * factor);
  } else {
    for (int d = 0; d < size; ++d) output[place(d)] = T::narrow(from[d] * factor);
  }
}

// T is the type of the cache, Q that of the queries, O that of the output; kSize is the head size, or
// 0 if it is known at run time only.
template <class T, class Q, class O, int kSize>
void attend_tile(const Attention& a, Scratch<T>& scratch, const Task& task, const Task* next) {
  typedef typename T::Element Element;
  const int per_group = a.heads / a.groups, size = kSize ? kSize : a.head_size, padded = padded_size(size);
  const int rows = task.tile.tokens * per_group, position0 = task.position0, last_position = task.last_position;
  const auto row_of = [&](int r) {
    return a.query_starts[task.tile.sequence] + task.tile.place(task.tile.token + r / per_group) - task.tile.cached;
  };
  const auto* from_queries = static_cast<const typename Q::Element*>(a.queries);
  float* const output = scratch.sums.data();
  Element* const queries = scratch.heads.data();
  auto* const assembled = reinterpret_cast<typename T::Stored*>(queries + kTileRows * padded);
  Softmax state;
  for (int r = 0; r < rows; ++r) {
    const int head = task.group * per_group + r % per_group;
    const auto* from = from_queries + row_of(r) * a.query_stride + head * a.query_head_stride;
    narrow_row<T>(queries + r * size, size, [&](int d) { return Q::widen(from + d); },
                  [&](int d) { return Q::widen(from[d]); });
    state.sum[r] = Vec{};
  }
  for (float& most : state.max) most = -std::numeric_limits<float>::infinity();
  std::memset(output, 0, sizeof(float) * rows * padded);
  for (int first = task.first_block(); first <= last_position; first += kBlock) {
    Part<T> parts[2], coming[2];
    find_block<T>(parts, a, assembled, task, first);
    const bool more = first + kBlock <= last_position, fetches = (more || next) && a.page_size % kLanes == 0;
    if (fetches) find_block<T>(coming, a, nullptr, more ? task : *next, more ? first + kBlock : next->first_block());
    // Between the parts of the work, since only so many requests can be under way.
    if (fetches) fetch(coming[0], true, size);
    // Rows that see this block are consecutive: later ones see more, windows leave earlier ones behind.
    const int skipped = first > position0 ? (first - position0) * per_group : 0;
    int live = rows;
    if (a.window && last_position >= first + kBlock + a.window - 1)
      live = (first + kBlock + a.window - 1 - position0) * per_group;
    float scores[kTileRows * kBlock], best[kTileRows] = {}, factors[kTileRows];
    Element weights[kTileRows * kBlock];
    for (int r = skipped, count; r < live; r += count)
      count = by_rows(live - r, [&](auto width) {
        score_rows<T, width()>(scores + r * kBlock, queries + r * size, parts, size, a.scale);
      });
    if (fetches) fetch(coming[0], false, size);
    for (int r = skipped; r < live; ++r) {
      const int position = position0 + r / per_group;
      const int begin = a.window && position >= a.window ? position - a.window + 1 : 0;
      best[r] = best_score(scores + r * kBlock, state.max[r], first, begin, position);
    }
    if (fetches) fetch(coming[1], true, size);
    weigh<T>(weights, state, factors, scores, best, parts, skipped, live);
    if (fetches) fetch(coming[1], false, size);
    const int from = first < task.first_seen ? task.first_seen - first : 0;
    const int to = last_position < first + kBlock ? last_position - first : kBlock - 1;
    for (int r = skipped, count; r < live; r += count)
      count = by_rows(live - r, [&](auto width) {
        add_values<T, width()>(output + r * padded, padded, factors + r, weights + r * kBlock, parts, size, from, to);
      });
  }
  for (int r = 0; r < rows; ++r) {
    const float inverse = 1.0f / sum(state.sum[r]);
    const float* from = output + r * padded;
    const int head = task.group * per_group + r % per_group;
    write_output<O>(a, row_of(r), head * size, size, from, inverse);
  }
}

template <class T, class Q, class O>
void attend(const Attention& a, Scratch<T>& scratch, const Task& task, const Task* next) {
  switch (a.head_size) {
    case 64: return attend_tile<T, Q, O, 64>(a, scratch, task, next);
    case 128: return attend_tile<T, Q, O, 128>(a, scratch, task, next);
    default: return attend_tile<T, Q, O, 0>(a, scratch, task, next);
  }
}

// Attends to tasks in the order in which `take` hands them out, until it has no more: while one is
// worked on, the first keys and values of the next are fetched.
template <class T, class Q, class O = T, class Take>
void attend_in_turn(const Attention& a, Scratch<T>& scratch, const std::vector<Tile>& tiles, const Take& take) {
  const int tasks = int(tiles.size()) * a.groups;
  const auto task = [&](int i) { return Task(a, tiles[i / a.groups], i % a.groups); };
  for (int i = take(), next; i < tasks; i = next) {
    next = take();
    if (next < tasks) {
      const Task following = task(next);
      attend<T, Q, O>(a, scratch, task(i), &following);
    } else {
      attend<T, Q, O>(a, scratch, task(i), nullptr);
    }
  }
}

}  // namespace
