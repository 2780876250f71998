// Paged attention for CPUs: reads K/V pages in place, any number of query rows per sequence.
//
// Row-count invariance is the point of this file. Everything done for a query row depends only
// on the row itself, its position and its keys: keys are visited in blocks aligned to absolute
// positions, in ascending order, with one fixed arithmetic per (row, key). Which rows share a
// tile, how a prompt was cut into chunks, how large pages are and how many threads run changes
// which loop computes a number, never the number.
#pragma once

#include <cmath>
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
  Element *keys, *values, *queries;
  float* output;
  explicit Scratch(int padded)
      : heads(size_t(padded) * (2 * kBlock + kTileRows)), sums(size_t(padded) * kTileRows) {
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

// Sixteen partial sums of one dot product over `padded` elements.
inline Vec partial_dot(const float* a, const float* b, int padded) {
  Vec sum = load(a) * load(b);
  for (int d = kLanes; d < padded; d += kLanes) sum += load(a + d) * load(b + d);
  return sum;
}

inline Vec partial_dot(const uint16_t* a, const uint16_t* b, int padded) {
  Vec sum = Vec{};
  for (int d = 0; d < padded; d += 2 * kLanes) sum = dot_pairs(sum, a + d, b + d);
  return sum;
}

// Scores of one query row against sixteen keys.
template <class Element, int kPadded>
inline Vec score(const Element* query, const Element* const* keys, int padded) {
  Vec products[kLanes];
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) products[j] = partial_dot(query, keys[j], kPadded ? kPadded : padded);
  return horizontal_sums(products);
}

// Turns one row's scores of a block into weights; the row sees positions [begin, last].
// Returns the factor by which what was summed before must shrink.
inline Vec weigh(Softmax& state, Vec (&weights)[kBlock / kLanes], int first, int begin, int last) {
  const IVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec lowest = broadcast(-std::numeric_limits<float>::infinity());
  Vec block_max = broadcast(state.max);
  for (int part = 0; part < kBlock / kLanes; ++part) {
    const IVec position = lane + (first + part * kLanes);
    const IVec visible = (position >= begin) & (position <= last);
    weights[part] = select(visible, weights[part], lowest);
    block_max = max(weights[part], block_max);
  }
  const float peak = largest(block_max);
  const Vec factor = exp_nonpositive(broadcast(state.max - peak));
  state.max = peak;
  state.sum *= factor;
  for (int part = 0; part < kBlock / kLanes; ++part) {
    const IVec seen = weights[part] > lowest;
    weights[part] = select(seen, exp_nonpositive(weights[part] - peak), Vec{});
    state.sum += weights[part];
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
  for (int first = first_seen / kBlock * kBlock; first <= last_position; first += kBlock) {
    const int from = first < first_seen ? first_seen - first : 0;
    const int to = last_position - first < kBlock - 1 ? last_position - first : kBlock - 1;
    const Element *keys[kBlock], *values[kBlock];
    for (int j = from; j <= to; ++j) {
      const int position = first + j;
      const int64_t slot = int64_t(pages[position / a.page_size]) * a.page_size + position % a.page_size;
      keys[j] = static_cast<const Element*>(a.key_cache) + (slot * a.groups + group) * size;
      values[j] = static_cast<const Element*>(a.value_cache) + (slot * a.groups + group) * size;
      if (padded != size) {
        keys[j] = (Element*)std::memcpy(scratch.keys + j * padded, keys[j], sizeof(Element) * size);
        values[j] = (Element*)std::memcpy(scratch.values + j * padded, values[j], sizeof(Element) * size);
      }
    }
    for (int j = 0; j < from; ++j) keys[j] = keys[from];  // masked below
    for (int j = to + 1; j < kBlock; ++j) keys[j] = keys[to];
    Vec factors[kTileRows];
    float weights[kTileRows * kBlock];
    int live = 0, skipped = 0;  // rows that see this block are consecutive
    for (int r = 0; r < rows; ++r) {
      const int position = position0 + r / per_group;
      const int begin = a.window && position >= a.window ? position - a.window + 1 : 0;
      if (first > position) { skipped = r + 1; continue; }
      if (first + kBlock <= begin) break;
      live = r + 1;
      Vec part[kBlock / kLanes];
      for (int i = 0; i < kBlock / kLanes; ++i)
        part[i] = score<Element, kPadded>(scratch.queries + r * padded, keys + i * kLanes, padded) * a.scale;
      factors[r] = weigh(state[r], part, first, begin, position);
      for (int i = 0; i < kBlock / kLanes; ++i) store(weights + r * kBlock + i * kLanes, part[i]);
    }
    int r = skipped;
    for (; r + 4 <= live; r += 4)
      add_values<T, 4>(scratch.output + r * padded, padded, factors + r, weights + r * kBlock, values, from, to);
    float* output = scratch.output + r * padded;
    switch (live - r) {
      case 3: add_values<T, 3>(output, padded, factors + r, weights + r * kBlock, values, from, to); break;
      case 2: add_values<T, 2>(output, padded, factors + r, weights + r * kBlock, values, from, to); break;
      case 1: add_values<T, 1>(output, padded, factors + r, weights + r * kBlock, values, from, to); break;
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

// Cuts every sequence's query tokens into tiles of at most kTileRows query rows.
inline std::vector<Tile> make_tiles(const Attention& a) {
  const int per_tile = kTileRows / (a.heads / a.groups);
  std::vector<Tile> tiles;
  for (int s = 0; s < a.sequences; ++s) {
    const int queries = a.query_starts[s + 1] - a.query_starts[s];
    for (int t = 0; t < queries; t += per_tile)
      tiles.push_back({s, t, queries - t < per_tile ? queries - t : per_tile});
  }
  return tiles;
}

}  // namespace
