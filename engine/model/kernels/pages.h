// Where keys and values lie in the pages of the cache, and who reads which of them.
//
// A page holds, for one group of heads after the other, the keys of its tokens and, in a store of
// its own, their values. Both lie as attention multiplies them: keys word by word, so that sixteen
// tokens' first words fill a vector, and values in pairs of tokens. Nobody else reads them.
#pragma once

#include <vector>

#include "eight_bits.h"

namespace {

constexpr int kBlock = 32;     // keys per online-softmax step
constexpr int kTileRows = 16;  // query rows that share one pass over K/V

// A run of query tokens of one sequence, each of which follows the one before it. Of a draft that
// branches there are several: they share what comes before, and each has a way of its own through
// the draft. Mirrored by rows of `Batch.branches`.
struct Branch {
  int32_t sequence;
  int32_t begin, end;  // its own query tokens, counted along its way from the sequence's first one
  int32_t fed;         // query tokens before the draft, which all branches share
  int32_t cached;      // query tokens that an earlier pass has computed: they have no rows in this one
  int32_t path;        // in `Attention::paths`, of its way; -1 = straight on
};

// One layer's attention over a packed batch. Strides count elements; the innermost one is 1.
struct Attention {
  const void* queries;                   // [T, H, D]
  void *key_cache, *value_cache;         // a page: [G] times what `write_token` makes of it
  void* output;                          // [T, H, D]; or in blocks of `output_rows`, see matmul.h
  const int32_t* query_starts;           // [S + 1]
  const int32_t* context_lengths;        // [S]
  const int32_t* page_tables;            // [S, M]
  const Branch* branches;                // of all sequences; null where no draft branches
  const int32_t* paths;                  // by depth, the query tokens that a branch goes through
  int64_t query_stride, query_head_stride;
  int32_t sequences, table_width, page_size;
  int32_t heads, groups, head_size, window;
  float scale;
  int32_t output_rows;
  int32_t num_branches, unused;
};

// Query tokens [token, token + tokens) of one sequence, along the way of a branch.
struct Tile {
  int sequence, token, tokens, fed, cached;
  const int32_t* path;  // null = straight on
  // Where the i-th query token on the way stands among all of the sequence, cached ones included.
  int place(int i) const { return path && i >= fed ? path[i - fed] : i; }
};

// Elements in a word of four bytes, the unit of multiplication: two in bfloat16, else one.
template <class T>
constexpr int kPerWord = 4 / sizeof(typename T::Element);

// Bytes in the cache of such a word.
template <class T>
constexpr int kWordBytes = kPerWord<T> * sizeof(typename T::Stored);

// Where a page begins, in what is stored of keys or of values.
template <class T>
inline int64_t page_place(const Attention& a, int64_t page, int group) {
  return (page * a.groups + group) * a.page_size * (a.head_size + kScaleBytes<T>);
}

// Where the element d of token j's value lies in a page, of one group. Tokens stand in pairs whose
// elements alternate, so that a word holds what one step multiplies; float32 has words of one.
template <class T>
inline int64_t value_place(int j, int d, int page_size, int size) {
  constexpr int w = kPerWord<T>;
  if (w > 1 && page_size % w && j == page_size - 1) return int64_t(j) * size + d;  // has no partner
  return int64_t(j / w * w) * size + d * w + j % w;
}

// A token's place in the cache, of one group.
template <class T>
struct Slot {
  typedef typename T::Stored Stored;
  Stored *keys, *values;  // of its page
  int token, page_size, size;
  Slot(const Attention& a, int64_t slot, int group)
      : token(int(slot % a.page_size)), page_size(a.page_size), size(a.head_size) {
    const int64_t page = page_place<T>(a, slot / page_size, group);
    keys = static_cast<Stored*>(a.key_cache) + page;
    values = static_cast<Stored*>(a.value_cache) + page;
  }
  // Elements [d, d + count) of its key. Keys lie word by word: the first word of all tokens of the
  // page, then the second.
  void write_key(int d, int count, const Stored* key) const {
    constexpr int w = kPerWord<T>;
    for (int i = 0; i < count; i += w)
      std::memcpy(keys + int64_t(d + i) * page_size + token * w, key + i, kWordBytes<T>);
  }
  // Elements [d, d + count) of its value; one by one, since another thread may write the partner.
  void write_value(int d, int count, const Stored* value) const {
    for (int i = 0; i < count; ++i) values[value_place<T>(token, d + i, page_size, size)] = value[i];
  }
  // A whole key and value, as they were computed.
  void write(const typename T::Element* key, const typename T::Element* value) const {
    if constexpr (kScaleBytes<T> != 0) {
      const int64_t scales = int64_t(page_size) * size + token * kScaleBytes<T>;
      round_head(key, size, keys + token, page_size, keys + scales);
      round_head(value, size, values + int64_t(token) * size, 1, values + scales);
    } else {
      write_key(0, size, key);
      write_value(0, size, value);
    }
  }
  // What is stored of another token.
  void copy(const Slot& from) const {
    constexpr int w = kPerWord<T>;
    for (int d = 0; d < size; d += w) write_key(d, w, from.keys + int64_t(d) * page_size + from.token * w);
    for (int d = 0; d < size; ++d) write_value(d, 1, from.values + value_place<T>(from.token, d, page_size, size));
    const int64_t scales = int64_t(page_size) * size;
    constexpr int bytes = kScaleBytes<T>;
    std::memcpy(keys + scales + token * bytes, from.keys + scales + from.token * bytes, bytes);
    std::memcpy(values + scales + token * bytes, from.values + scales + from.token * bytes, bytes);
  }
};

// Keys and values of sixteen tokens; `stride` words lie between a key's word and its next.
template <class T>
struct Part {
  const typename T::Stored *keys, *values;
  int stride;
  const typename T::Stored *key_scales, *value_scales;  // where they have any
};

// A tile's work for the heads of one group: what it reads.
struct Task {
  Tile tile;
  int group, position0, last_position, first_seen;  // of its queries, and of what any of them sees
  int start;                                        // position of the sequence's first query token
  const int32_t* pages;
  Task(const Attention& a, const Tile& tile, int group) : tile(tile), group(group) {
    const int num_queries = a.query_starts[tile.sequence + 1] - a.query_starts[tile.sequence];
    start = a.context_lengths[tile.sequence] - num_queries - tile.cached;
    position0 = start + tile.token;
    last_position = position0 + tile.tokens - 1;
    first_seen = a.window && position0 >= a.window ? position0 - a.window + 1 : 0;
    pages = a.page_tables + int64_t(tile.sequence) * a.table_width;
  }
  int first_block() const { return first_seen / kBlock * kBlock; }
  // Where a position's key and value lie among those of the sequence: of a draft that branches, they
  // lie in the order of its tokens.
  int place(int position) const { return position < start ? position : start + tile.place(position - start); }
  // Whether all positions before this one lie where they would in a text.
  bool straight(int end) const { return !tile.path || end <= start + tile.fed; }
};

// The part of the positions [first, first + 16), of which those up to the task's last are written.
// Where a draft branches they are put together, so that what follows cannot tell it from a text.
// Without `scratch` it is only said what lies there.
template <class T>
inline Part<T> find_part(const Attention& a, typename T::Stored* scratch, const Task& task, int first) {
  typedef typename T::Stored Stored;
  constexpr int w = kPerWord<T>, bytes = kWordBytes<T>, scale = kScaleBytes<T>;
  const int page_size = a.page_size, size = a.head_size;
  const int64_t scales = int64_t(page_size) * size;
  const auto *keys = static_cast<const Stored*>(a.key_cache), *values = static_cast<const Stored*>(a.value_cache);
  Stored *const key = scratch, *const value = scratch + kLanes * size;
  Stored *const key_scales = value + kLanes * size, *const value_scales = key_scales + kLanes * scale;
  int begin = 0;
  const auto find = [&](int place) { return page_place<T>(a, task.pages[place / page_size], task.group); };
  if (page_size % kLanes == 0) {
    const int64_t page = find(first), j = first % page_size, at = page + scales + j * scale;
    const Part<T> part = {keys + page + j * w, values + page + j * size, page_size, keys + at, values + at};
    if (!scratch || task.straight(first + kLanes)) return part;
    for (int d = 0; d < size; d += w) std::memcpy(key + d * kLanes, part.keys + int64_t(d) * page_size, bytes * kLanes);
    std::memcpy(value, part.values, sizeof(Stored) * kLanes * size);
    std::memcpy(key_scales, part.key_scales, kLanes * scale);
    std::memcpy(value_scales, part.value_scales, kLanes * scale);
    while (begin < kLanes && task.straight(first + begin + 1)) ++begin;
  }
  for (int i = begin; i < kLanes && first + i <= task.last_position; ++i) {
    const int place = task.place(first + i), j = place % page_size;
    const int64_t page = find(place), at = page + scales + j * scale;
    for (int d = 0; d < size; d += w)
      std::memcpy(key + d * kLanes + i * w, keys + page + int64_t(d) * page_size + j * w, bytes);
    for (int d = 0; d < size; ++d)
      value[value_place<T>(i, d, kLanes, size)] = values[page + value_place<T>(j, d, page_size, size)];
    std::memcpy(key_scales + i * scale, keys + at, scale);
    std::memcpy(value_scales + i * scale, values + at, scale);
  }
  return {key, value, kLanes, key_scales, value_scales};
}

// Both parts of the block at `first`; where there is but one, it is seen twice and hidden once.
template <class T>
inline void find_block(Part<T>* parts, const Attention& a, typename T::Stored* scratch, const Task& task, int first) {
  parts[0] = parts[1] = find_part<T>(a, scratch, task, first);
  if (first + kLanes <= task.last_position)
    parts[1] = find_part<T>(a, scratch ? scratch + kBlock * (a.head_size + kScaleBytes<T>) : nullptr, task, first + kLanes);
}

// Keys or values of a part, into the second-level cache: pages lie anywhere, and the processor
// itself does not see what comes next. Always inlined, or the compiler takes a function without
// effects for one without purpose.
template <class T>
__attribute__((always_inline)) inline void fetch(const Part<T>& part, bool keys, int size) {
  constexpr int line = 64 / (kLanes * sizeof(typename T::Stored));  // elements of sixteen tokens
  for (int d = 0; d < size; d += line)
    __builtin_prefetch(keys ? part.keys + int64_t(d) * part.stride : part.values + d * kLanes, 0, 2);
}

// Cuts every sequence's query tokens, or every branch's, into nearly equal tiles of at most
// kTileRows query rows.
inline std::vector<Tile> make_tiles(const Attention& a) {
  const int per_tile = kTileRows / (a.heads / a.groups);
  std::vector<Tile> tiles;
  const auto cut = [&](const Branch& b) {
    const int64_t queries = b.end - b.begin, cuts = (queries + per_tile - 1) / per_tile;
    const int32_t* path = b.path < 0 ? nullptr : a.paths + b.path;
    for (int64_t c = 0, from = 0, to; c < cuts; ++c, from = to)
      tiles.push_back({b.sequence, int(b.begin + from), int((to = queries * (c + 1) / cuts) - from), b.fed, b.cached, path});
  };
  for (int i = 0; i < a.num_branches; ++i) cut(a.branches[i]);
  for (int s = 0; !a.branches && s < a.sequences; ++s) cut({s, 0, a.query_starts[s + 1] - a.query_starts[s], 0, 0, -1});
  return tiles;
}

}  // namespace
