// A whole decoder of the Llama family in one call: no allocation, no dispatch, few barriers.
#pragma once

#include "attention.h"
#include "matmul.h"
#include "rotation.h"
#include "threads.h"

// Mirrors `_Layer` in native_decoder.py. Pointers may be null where the model has no such part.
struct Layer {
  const float *input_norm, *post_norm;  // [hidden]
  // Packed. Gate and up alternate by 16 outputs, and so do both halves of a query or key if `paired`.
  const void *qkv, *output, *gate_up, *down;
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;  // padded to blocks
  const float *query_norm, *key_norm;  // [head_size]
  void *key_cache, *value_cache;  // see attention.h
  int32_t window, unused;
};

// Mirrors `_Decoder` in native_decoder.py.
struct Decoder {
  const Layer* layers;
  const void* embedding;  // [V, hidden] in the weights' type
  const float* final_norm;
  const void* head;  // packed [V, hidden]
  const float *cosines, *sines;  // [max_len, head_size]
  int32_t num_layers, hidden, intermediate, vocab;
  int32_t heads, groups, head_size, bfloat16;
  float epsilon, scale;
  int32_t paired, unused;
};

// Mirrors `_Step` in native_decoder.py: one packed batch and the buffers it needs.
struct Step {
  const int64_t *input_ids, *positions, *slots;  // [T]
  const int64_t* logit_rows;  // [R]
  const int32_t *query_starts, *context_lengths, *page_tables;
  const Branch* branches;  // see pages.h
  const int32_t* paths;
  float *residual, *squares;  // [hidden / 32, T, 32]; [hidden / 32, T], the sums of its squares
  void *normed, *queries;     // [max(hidden, heads * head_size) / 32, T, 32], [heads, T, head_size]
  float* qkv;                 // [T, (heads + 2 * groups) * head_size], padded to blocks
  void* gated;                // [intermediate / 32, T, 32]; as normed and queries in the weights' type
  float* logits;    // [R, V]
  float* features;  // [F, T, hidden], the residual stream after each of `feature_layers` [F]
  const int32_t* feature_layers;  // 0 = embeddings, i = after i layers
  int32_t rows, num_logits, sequences, table_width, page_size, num_features, num_branches, unused;
};

namespace {

template <class T, class W>
struct Forward {
  typedef typename T::Element Element;
  const Decoder& m;
  const Step& s;
  Barrier& barrier;
  const int padded_qkv = num_blocks((m.heads + 2 * m.groups) * m.head_size) * kBlockOutputs;
  Element* const normed = static_cast<Element*>(s.normed);
  Element* const queries = static_cast<Element*>(s.queries);
  Element* const gated = static_cast<Element*>(s.gated);

  // The residual stream lies in blocks, as what is multiplied does, and each thread keeps to its own.
  // What the others need to know, for the norms, are the sums of squares.
  Share own_blocks() const { return Share(num_blocks(m.hidden)); }

  float* residual_block(int block, int64_t row) const { return s.residual + (int64_t(block) * s.rows + row) * kBlockOutputs; }

  int width_of(int block) const {
    const int left = m.hidden - block * kBlockOutputs;
    return left < kBlockOutputs ? left : kBlockOutputs;
  }

  void embed() const {
    const Share own = own_blocks();
    for (int t = 0; t < s.rows; ++t)
      for (int block = own.begin; block < own.end; ++block) {
        float* to = residual_block(block, t);
        std::memset(to, 0, sizeof(float) * kBlockOutputs);
        widen_row<T>(to, static_cast<const Element*>(m.embedding) + s.input_ids[t] * m.hidden + block * kBlockOutputs, width_of(block));
        add_block(t, block, Vec{}, Vec{});
      }
    barrier.wait();
  }

  // Adds outputs of a block to the residual stream.
  void add_block(int row, int block, Vec first, Vec second) const {
    float* to = residual_block(block, row);
    first += load(to);
    second += load(to + kLanes);
    store(to, first);
    store(to + kLanes, second);
    s.squares[int64_t(block) * s.rows + row] = sum(first * first) + sum(second * second);
  }

  // Copies the residual stream where it is asked for. Each thread keeps to its own blocks, which
  // nobody else writes, so none waits.
  void keep_features(int layer) const {
    for (int f = 0; f < s.num_features; ++f) {
      if (s.feature_layers[f] != layer) continue;
      const Share own = own_blocks();
      for (int t = 0; t < s.rows; ++t)
        for (int block = own.begin; block < own.end; ++block)
          std::memcpy(s.features + (int64_t(f) * s.rows + t) * m.hidden + block * kBlockOutputs, residual_block(block, t),
                      sizeof(float) * width_of(block));
    }
  }

  // Norms `count` rows: those given, or all.
  void norm_rows(const float* weight, const int64_t* rows, int count) const {
    const Share own = own_blocks();
    for (int i = 0; i < count; ++i) {
      const int64_t t = rows ? rows[i] : i;
      float total = 0.0f;
      for (int block = 0; block < num_blocks(m.hidden); ++block) total += s.squares[block * int64_t(s.rows) + t];
      const float factor = 1.0f / std::sqrt(total / m.hidden + m.epsilon);
      for (int block = own.begin; block < own.end; ++block) {
        const float *x = residual_block(block, t), *w = weight + block * kBlockOutputs;
        narrow_row<T>(normed + (int64_t(block) * count + i) * kBlockInputs, width_of(block),
                      [&](int d) { return load(x + d) * factor * load(w + d); }, [&](int d) { return x[d] * factor * w[d]; });
      }
    }
    barrier.wait();
  }

  // Queries, keys and values; keys and values go into the cache.
  void project_qkv(const Layer& layer, const Attention& a, Element* scratch) const {
    const Share share(padded_qkv / kBlockOutputs);
    multiply<W>(normed, s.rows, m.hidden, static_cast<const Element*>(layer.qkv), share.begin, share.end,
                [&](int row, int block, const Vec* sums) {
                  Vec first = sums[0], second = sums[1];
                  if (layer.qkv_bias) {
                    first += load(layer.qkv_bias + block * kBlockOutputs);
                    second += load(layer.qkv_bias + block * kBlockOutputs + kLanes);
                  }
                  if (m.paired) return place_pair(a, row, block, first, second);
                  float* to = s.qkv + int64_t(row) * padded_qkv + block * kBlockOutputs;
                  store(to, first);
                  store(to + kLanes, second);
                });
    barrier.wait();
    if (!m.paired) rotate_and_store(layer, a, scratch);
  }

  // One block of a row: sixteen elements of a query or key and their partners, which are rotated at
  // once, or 32 elements of a value.
  void place_pair(const Attention& a, int row, int block, Vec first, Vec second) const {
    const int size = m.head_size, head = block * kBlockOutputs / size, d = block * kBlockOutputs % size;
    Element narrow[kBlockOutputs];
    if (head < m.heads + m.groups) {
      const int at = d / 2, half = size / 2;
      const int64_t angle = s.positions[row] * size + at;
      rotate_pair(first, second, m.cosines + angle, m.sines + angle, half);
      if (head < m.heads) {
        Element* to = queries + (int64_t(head) * s.rows + row) * size + at;
        T::narrow(to, first);
        T::narrow(to + half, second);
        return;
      }
      T::narrow(narrow, first);
      T::narrow(narrow + kLanes, second);
      const Slot<T> slot(a, s.slots[row], head - m.heads);
      slot.write_key(at, kLanes, narrow);
      slot.write_key(at + half, kLanes, narrow + kLanes);
    } else {
      T::narrow(narrow, first);
      T::narrow(narrow + kLanes, second);
      Slot<T>(a, s.slots[row], head - m.heads - m.groups).write_value(d, kBlockOutputs, narrow);
    }
  }

  // Rotates queries and keys; writes keys and values into the cache.
  void rotate_and_store(const Layer& layer, const Attention& a, Element* scratch) const {
    const int size = m.head_size;
    const auto turn = [&](int t, int head, const float* norm) {
      float* x = s.qkv + int64_t(t) * padded_qkv + head * size;
      rotate(x, norm, m.cosines + s.positions[t] * size, m.sines + s.positions[t] * size, size, m.epsilon);
      return x;
    };
    const Share rows(s.rows);
    for (int t = rows.begin; t < rows.end; ++t)
      for (int h = 0; h < m.heads; ++h)
        narrow_row<T>(queries + (int64_t(h) * s.rows + t) * size, turn(t, h, layer.query_norm), size);
    // Group by group: the tokens of a page write to the same cache lines.
    const Share share(s.rows * m.groups);
    for (int i = share.begin; i < share.end; ++i) {
      const int g = i / s.rows, t = i % s.rows;
      const float* key = turn(t, m.heads + g, layer.key_norm);
      narrow_row<T>(scratch, key, size);
      narrow_row<T>(scratch + size, key + m.groups * size, size);
      const Slot<T> slot(a, s.slots[t], g);
      slot.write_key(0, size, scratch);
      slot.write_value(0, size, scratch + size);
    }
    barrier.wait();
  }

  void attend_all(const Attention& a, const std::vector<Tile>& tiles, Scratch<T>& scratch) const {
    attend_in_turn<T, T>(a, scratch, tiles, [&] { return barrier.next_task(); });
    barrier.wait();
  }

  // residual += x W^T + bias
  void project_back(const Element* x, int inputs, const void* packed, const float* bias) const {
    const Share own = own_blocks();
    multiply<W>(x, s.rows, inputs, static_cast<const Element*>(packed), own.begin, own.end,
                [&](int row, int block, const Vec* sums) {
                  Vec first = sums[0], second = sums[1];
                  if (bias) {
                    first += load(bias + block * kBlockOutputs);
                    second += load(bias + block * kBlockOutputs + kLanes);
                  }
                  add_block(row, block, first, second);
                });
    barrier.wait();
  }

  // gated = silu(x W_gate^T) * (x W_up^T): a block holds 16 outputs of each
  void gate(const Layer& layer) const {
    const Share share((m.intermediate + kLanes - 1) / kLanes);
    multiply<W>(normed, s.rows, m.hidden, static_cast<const Element*>(layer.gate_up), share.begin, share.end,
                [&](int row, int block, const Vec* sums) {
                  Vec gate = sums[0], up = sums[1];
                  if (layer.gate_up_bias) {
                    gate += load(layer.gate_up_bias + block * kBlockOutputs);
                    up += load(layer.gate_up_bias + block * kBlockOutputs + kLanes);
                  }
                  const Vec product = silu(gate) * up;
                  Element* to = gated + block_place(row, block * kLanes, s.rows);
                  const int width = m.intermediate - block * kLanes;
                  if (width >= kLanes) T::narrow(to, product);
                  else for (int i = 0; i < width; ++i) to[i] = T::narrow(product[i]);
                });
    barrier.wait();
  }

  void compute_logits() const {
    norm_rows(m.final_norm, s.logit_rows, s.num_logits);
    const Share share(num_blocks(m.vocab));
    multiply<W>(normed, s.num_logits, m.hidden, static_cast<const Element*>(m.head), share.begin, share.end,
                [&](int row, int block, const Vec* sums) {
                  float* to = s.logits + int64_t(row) * m.vocab + block * kBlockOutputs;
                  const int width = m.vocab - block * kBlockOutputs;
                  if (width >= kBlockOutputs) {
                    store(to, sums[0]);
                    store(to + kLanes, sums[1]);
                  } else {
                    for (int i = 0; i < width; ++i) to[i] = sums[i / kLanes][i % kLanes];
                  }
                });
  }

  void run() const {
    Attention a{};
    a.queries = s.queries;
    a.output = s.normed;
    a.output_rows = s.rows;
    a.query_starts = s.query_starts;
    a.context_lengths = s.context_lengths;
    a.page_tables = s.page_tables;
    a.branches = s.branches;
    a.paths = s.paths;
    a.num_branches = s.num_branches;
    a.query_stride = m.head_size;
    a.query_head_stride = int64_t(s.rows) * m.head_size;
    a.sequences = s.sequences;
    a.table_width = s.table_width;
    a.page_size = s.page_size;
    a.heads = m.heads;
    a.groups = m.groups;
    a.head_size = m.head_size;
    a.scale = m.scale;
    const std::vector<Tile> tiles = make_tiles(a);
#pragma omp parallel
    {
      Scratch<T> scratch(padded_size(m.head_size));
      embed();
      keep_features(0);
      for (int l = 0; l < m.num_layers; ++l) {
        const Layer& layer = m.layers[l];
        norm_rows(layer.input_norm, nullptr, s.rows);
        Attention own = a;
        own.key_cache = layer.key_cache;
        own.value_cache = layer.value_cache;
        own.window = layer.window;
        project_qkv(layer, own, scratch.heads.data());
        attend_all(own, tiles, scratch);
        project_back(normed, m.heads * m.head_size, layer.output, layer.output_bias);
        norm_rows(layer.post_norm, nullptr, s.rows);
        gate(layer);
        project_back(gated, m.intermediate, layer.down, layer.down_bias);
        keep_features(l + 1);
      }
      if (s.num_logits) compute_logits();
    }
  }
};

}  // namespace
