// Paged attention for CPUs: reads K/V pages in place, any number of query rows per sequence.
//
// Row-count invariance is the point of this file. Everything done for a query row depends only
// on the row itself, its position and its keys: keys are visited in blocks aligned to absolute
// positions, in ascending order, with one fixed arithmetic per (row, key). Which rows share a
// tile, how a prompt was cut into chunks, how large pages are and how many threads run changes
// which loop computes a number, never the number.
#pragma once

#include <cmath>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kBlock = 32;     // keys per online-softmax step
constexpr int kTileRows = 16;  // query rows that share one pass over K/V

// One layer's attention over a packed batch. Strides count elements; the innermost one is 1.
struct Attention {
  const void* queries;                   // [T, H, D]
  const void *key_cache, *value_cache;   // [slots, G, D], contiguous
  void* output;                          // [T, H, D], contiguous
  const int32_t* query_starts;           // [S + 1]
  const int32_t* context_lengths;        // [S]
  const int32_t* page_tables;            // [S, M]
  int64_t query_stride, query_head_stride;
  int32_t sequences, table_width, page_size;
  int32_t heads, groups, head_size, window;
  float scale;
};

// Query tokens [token, token + tokens) of one sequence, for the heads of one group.
struct Tile { int sequence, token, tokens; };

// Heads are padded to whole bfloat16 vectors, with zeros.
inline int padded_size(int size) { return (size + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

// Working memory of one thread; all rows are padded.
template <class T>
struct Scratch {
  typedef typename T::Element Element;
  std::vector<Element> heads;   // keys, values and queries that need padding
  std::vector<float> sums;
  std::vector<IVec> transposed;  // the block's keys by word
  Element *keys, *values, *queries;
  float* output;
  explicit Scratch(int padded)
      : heads(size_t(padded) * (2 * kBlock + kTileRows)), sums(size_t(padded) * kTileRows),
        transposed(sizeof(Element) * padded * kBlock / sizeof(IVec)) {
    keys = heads.data();
    values = keys + size_t(padded) * kBlock;
    queries = values + size_t(padded) * kBlock;
    output = sums.data();
  }
};

// What one query row knows of the keys seen so far.
struct Softmax {
  float max;
  Vec sum;
};

// Scores of kRows query rows against the block's keys, which lie transposed: word u of all keys,
// then word u + 1. A score is one accumulator that runs through the words in ascending order.
template <class T, int kRows>
inline void score_rows(float* scores, const typename T::Element* queries, const IVec* keys, int words, float scale) {
  constexpr int parts = kBlock / kLanes, per_word = 4 / sizeof(typename T::Element);
  Vec sums[kRows][parts];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int i = 0; i < parts; ++i) sums[r][i] = Vec{};
  for (int u = 0; u < words; ++u)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const IVec query = broadcast_word(queries + (r * words + u) * per_word);
#pragma GCC unroll 2
      for (int i = 0; i < parts; ++i) sums[r][i] = T::multiply_words(sums[r][i], query, keys[u * parts + i]);
    }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int i = 0; i < parts; ++i) store(scores + r * kBlock + i * kLanes, sums[r][i] * scale);
}

// Word u of keys [0, kBlock) goes to to[u]; a word is one float32 or two bfloat16 elements.
template <class Element>
inline void transpose_keys(IVec* to, const Element* const* keys, int words) {
  constexpr int parts = kBlock / kLanes, per_word = 4 / sizeof(Element);
  for (int i = 0; i < parts; ++i)
    for (int u = 0; u < words; u += kLanes) {
      IVec square[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) std::memcpy(&square[j], keys[i * kLanes + j] + u * per_word, sizeof(IVec));
      transpose(square);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) to[(u + j) * parts + i] = square[j];
    }
}

// Turns one row's scores of a block into weights; the row sees positions [begin, last].
// Returns the factor by which what was summed before must shrink.
inline Vec weigh(Softmax& state, float* row, int first, int begin, int last) {
  Vec weights[kBlock / kLanes];
  for (int part = 0; part < kBlock / kLanes; ++part) weights[part] = load(row + part * kLanes);
  const IVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec lowest = broadcast(-std::numeric_limits<float>::infinity());
  Vec block_max = broadcast(state.max);
  if (first < begin || first + kBlock - 1 > last)
    for (int part = 0; part < kBlock / kLanes; ++part) {
      const IVec position = lane + (first + part * kLanes);
      weights[part] = select((position >= begin) & (position <= last), weights[part], lowest);
    }
  for (int part = 0; part < kBlock / kLanes; ++part) block_max = max(weights[part], block_max);
  const float peak = largest(block_max);
  const Vec factor = exp_nonpositive(broadcast(state.max - peak));
  state.max = peak;
  state.sum *= factor;
  for (int part = 0; part < kBlock / kLanes; ++part) {
    const IVec seen = weights[part] > lowest;
    weights[part] = select(seen, exp_nonpositive(weights[part] - peak), Vec{});
    state.sum += weights[part];
    store(row + part * kLanes, weights[part]);
  }
  return factor;
}

// output = output * factor + weights * values, for kRows rows and kVectors vectors of a head.
template <class T, int kRows, int kVectors>
inline void add_values(float* output, int padded, const Vec* factors, const float* weights,
                       const typename T::Element* const* values, int from, int to, int d) {
  Vec sums[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[r][v] = load(output + r * padded + d + v * kLanes) * factors[r];
  for (int j = from; j <= to; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vec value = T::widen(values[j] + d + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[r][v] += weights[r * kBlock + j] * value;
    }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(output + r * padded + d + v * kLanes, sums[r][v]);
}

template <class T, int kRows>
inline void add_values(float* output, int padded, const Vec* factors, const float* weights,
                       const typename T::Element* const* values, int from, int to) {
  int d = 0;
  for (; d + 4 * kLanes <= padded; d += 4 * kLanes)
    add_values<T, kRows, 4>(output, padded, factors, weights, values, from, to, d);
  if (d < padded) add_values<T, kRows, 2>(output, padded, factors, weights, values, from, to, d);
}

// Slots of the positions [first, last] of a sequence.
inline void find_slots(int64_t* slots, const int32_t* pages, int page_size, int first, int last) {
  int page = first / page_size, offset = first % page_size;
  for (int position = first; position <= last; ++position) {
    *slots++ = int64_t(pages[page]) * page_size + offset;
    if (++offset == page_size) offset = 0, ++page;
  }
}

// A quarter of a block's keys and values, into the second-level cache. Pages lie anywhere, and of
// each token a group reads two short pieces, so the processor itself does not see what comes next.
// Always inlined, or the compiler takes a function without effects for one without purpose.
template <class Element>
__attribute__((always_inline)) inline void fetch(const Attention& a, const int64_t* slots, int count, int quarter, int group) {
  for (int j = quarter * kBlock / 4; j < (quarter + 1) * kBlock / 4 && j < count; ++j) {
    const int64_t at = (slots[j] * a.groups + group) * a.head_size;
    for (int d = 0; d < a.head_size; d += 64 / int(sizeof(Element))) {
      __builtin_prefetch(static_cast<const Element*>(a.key_cache) + at + d, 0, 2);
      __builtin_prefetch(static_cast<const Element*>(a.value_cache) + at + d, 0, 2);
    }
  }
}

// Calls f with the largest supported number of rows up to `rows`, as a constant; returns it.
template <class F>
inline int by_rows(int rows, const F& f) {
  if (rows >= 4) return f(std::integral_constant<int, 4>()), 4;
  if (rows == 3) return f(std::integral_constant<int, 3>()), 3;
  if (rows == 2) return f(std::integral_constant<int, 2>()), 2;
  return f(std::integral_constant<int, 1>()), 1;
}

// T is the type of cache and output, Q that of the queries; kPadded is the padded head size, or
// 0 if it is known at run time only.
template <class T, class Q, int kPadded>
void attend_tile(const Attention& a, Scratch<T>& scratch, const Tile& tile, int group) {
  typedef typename T::Element Element;
  const int per_group = a.heads / a.groups, size = a.head_size;
  const int padded = kPadded ? kPadded : padded_size(size);
  const int rows = tile.tokens * per_group;
  const int row0 = a.query_starts[tile.sequence] + tile.token;
  const int num_queries = a.query_starts[tile.sequence + 1] - a.query_starts[tile.sequence];
  const int position0 = a.context_lengths[tile.sequence] - num_queries + tile.token;
  const int32_t* pages = a.page_tables + int64_t(tile.sequence) * a.table_width;
  const auto* queries = static_cast<const typename Q::Element*>(a.queries);
  Softmax state[kTileRows];
  for (int r = 0; r < rows; ++r) {
    const int head = group * per_group + r % per_group;
    const auto* from = queries + (row0 + r / per_group) * a.query_stride + head * a.query_head_stride;
    narrow_row<T>(scratch.queries + r * padded, size, [&](int d) { return Q::widen(from + d); },
                  [&](int d) { return Q::widen(from[d]); });
    state[r] = {-std::numeric_limits<float>::infinity(), Vec{}};
  }
  std::memset(scratch.output, 0, sizeof(float) * rows * padded);
  const int last_position = position0 + tile.tokens - 1;
  const int first_seen = a.window && position0 >= a.window ? position0 - a.window + 1 : 0;
  const int first_block = first_seen / kBlock * kBlock;
  const auto last_of = [&](int first) { return last_position < first + kBlock ? last_position : first + kBlock - 1; };
  int64_t both[2][kBlock];  // slots of the present block and of the next one
  find_slots(both[0], pages, a.page_size, first_block, last_of(first_block));
  for (int first = first_block, turn = 0; first <= last_position; first += kBlock, turn ^= 1) {
    const int64_t *slots = both[turn], *next_slots = both[turn ^ 1];
    const int next = first + kBlock, coming = next <= last_position ? last_of(next) - next + 1 : 0;
    if (coming) find_slots(both[turn ^ 1], pages, a.page_size, next, last_of(next));
    // Between the parts of the work, since only so many requests can be under way.
    fetch<Element>(a, next_slots, coming, 0, group);
    const int from = first < first_seen ? first_seen - first : 0, to = last_of(first) - first;
    const Element *keys[kBlock], *values[kBlock];
    for (int j = from; j <= to; ++j) {
      keys[j] = static_cast<const Element*>(a.key_cache) + (slots[j] * a.groups + group) * size;
      values[j] = static_cast<const Element*>(a.value_cache) + (slots[j] * a.groups + group) * size;
      if (padded != size) {
        keys[j] = (Element*)std::memcpy(scratch.keys + j * padded, keys[j], sizeof(Element) * size);
        values[j] = (Element*)std::memcpy(scratch.values + j * padded, values[j], sizeof(Element) * size);
      }
    }
    for (int j = 0; j < from; ++j) keys[j] = keys[from];  // masked below
    for (int j = to + 1; j < kBlock; ++j) keys[j] = keys[to];
    const int words = padded * int(sizeof(Element)) / 4;
    IVec* by_word = scratch.transposed.data();
    transpose_keys(by_word, keys, words);
    fetch<Element>(a, next_slots, coming, 1, group);
    // Rows that see this block are consecutive: later ones see more, windows leave earlier ones behind.
    const int skipped = first > position0 ? (first - position0) * per_group : 0;
    int live = rows;
    if (a.window && position0 + tile.tokens - 1 >= first + kBlock + a.window - 1)
      live = (first + kBlock + a.window - 1 - position0) * per_group;
    Vec factors[kTileRows];
    float weights[kTileRows * kBlock];
    for (int r = skipped, count; r < live; r += count) {
      count = by_rows(live - r, [&](auto width) {
        score_rows<T, width()>(weights + r * kBlock, scratch.queries + r * padded, by_word, words, a.scale);
      });
    }
    fetch<Element>(a, next_slots, coming, 2, group);
    for (int r = skipped; r < live; ++r) {
      const int position = position0 + r / per_group;
      const int begin = a.window && position >= a.window ? position - a.window + 1 : 0;
      factors[r] = weigh(state[r], weights + r * kBlock, first, begin, position);
    }
    fetch<Element>(a, next_slots, coming, 3, group);
    for (int r = skipped, count; r < live; r += count) {
      count = by_rows(live - r, [&](auto width) {
        add_values<T, width()>(scratch.output + r * padded, padded, factors + r, weights + r * kBlock, values, from, to);
      });
    }
  }
  for (int r = 0; r < rows; ++r) {
    const float inverse = 1.0f / sum(state[r].sum);
    const float* from = scratch.output + r * padded;
    const int head = group * per_group + r % per_group;
    Element* to = static_cast<Element*>(a.output) + (int64_t(row0 + r / per_group) * a.heads + head) * size;
    narrow_row<T>(to, size, [&](int d) { return load(from + d) * inverse; },
                  [&](int d) { return from[d] * inverse; });
  }
}

template <class T, class Q>
void attend(const Attention& a, Scratch<T>& scratch, const Tile& tile, int group) {
  switch (padded_size(a.head_size)) {
    case 64: return attend_tile<T, Q, 64>(a, scratch, tile, group);
    case 128: return attend_tile<T, Q, 128>(a, scratch, tile, group);
    default: return attend_tile<T, Q, 0>(a, scratch, tile, group);
  }
}

// Cuts every sequence's query tokens into nearly equal tiles of at most kTileRows query rows.
inline std::vector<Tile> make_tiles(const Attention& a) {
  const int per_tile = kTileRows / (a.heads / a.groups);
  std::vector<Tile> tiles;
  for (int s = 0; s < a.sequences; ++s) {
    const int64_t queries = a.query_starts[s + 1] - a.query_starts[s], cuts = (queries + per_tile - 1) / per_tile;
    for (int64_t c = 0, from = 0, to; c < cuts; ++c, from = to)
      tiles.push_back({s, int(from), int((to = queries * (c + 1) / cuts) - from)});
  }
  return tiles;
}

}  // namespace
