// A whole decoder of the Llama family in one call: no allocation, no dispatch, few barriers.
#pragma once

#include "attention.h"
#include "layouts.h"
#include "rotation.h"
#include "threads.h"

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
        if (m.embedding_form == kDense)
          widen_row<T>(to, static_cast<const Element*>(m.embedding) + s.input_ids[t] * m.hidden + block * kBlockOutputs, width_of(block));
        else
          widen_fewbit(m.embedding_form, m.embedding, m.hidden, s.input_ids[t], block, to);
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

  // Norms `count` rows, those given or all, for a matrix that they are multiplied with.
  void norm_rows(const float* weight, const int64_t* rows, int count, const Matrix& matrix) const {
    const Share own = own_blocks();
    for (int i = 0; i < count; ++i) {
      const int64_t t = rows ? rows[i] : i;
      float total = 0.0f;
      for (int block = 0; block < num_blocks(m.hidden); ++block) total += s.squares[block * int64_t(s.rows) + t];
      const float factor = 1.0f / std::sqrt(total / m.hidden + m.epsilon);
      for (int block = own.begin; block < own.end; ++block) {
        const float *x = residual_block(block, t), *w = weight + block * kBlockOutputs;
        if (!matrix.is_dense()) {
          quantize(s.normed_groups, int64_t(block) * count + i, m.planes, load(x) * factor * load(w),
                   load(x + kLanes) * factor * load(w + kLanes));
          continue;
        }
        narrow_row<T>(normed + (int64_t(block) * count + i) * kBlockInputs, width_of(block),
                      [&](int d) { return load(x + d) * factor * load(w + d); }, [&](int d) { return x[d] * factor * w[d]; });
      }
    }
    barrier.wait();
  }

  // Queries, keys and values; if they are paired, keys and values go into the cache.
  void project_qkv(const Layer& layer, const Attention& a) const {
    const Share share(padded_qkv / kBlockOutputs);
    multiply_matrix<W>(layer.qkv, m.planes, normed, s.normed_groups, s.rows, m.hidden, share.begin, share.end,
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

  // Rotates queries and keys; writes keys and values into the cache, whose type is C.
  template <class C>
  void rotate_and_store(const Layer& layer, const Attention& a, typename C::Element* scratch) const {
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
      narrow_row<C>(scratch, key, size);
      narrow_row<C>(scratch + size, key + m.groups * size, size);
      Slot<C>(a, s.slots[t], g).write(scratch, scratch + size);
    }
    barrier.wait();
  }

  // What heads say, as the output layer wants it.
  template <class C>
  void attend_all(const Attention& a, const std::vector<Tile>& tiles, Scratch<C>& scratch, const Matrix& matrix) const {
    const auto take = [&] { return barrier.next_task(); };
    if (matrix.is_dense()) {
      attend_in_turn<C, T, T>(a, scratch, tiles, take);
    } else {  // in float32, until all heads of a group are there
      attend_in_turn<C, T, Float32>(a, scratch, tiles, take);
      barrier.wait();
      const auto* x = static_cast<const float*>(s.normed);
      const Share share(m.heads * m.head_size / kBlockInputs * s.rows);
      for (int64_t i = share.begin; i < share.end; ++i)
        quantize(s.normed_groups, i, m.planes, load(x + i * kBlockInputs), load(x + i * kBlockInputs + kLanes));
    }
    barrier.wait();
  }

  // residual += x W^T + bias
  void project_back(const Element* x, const void* groups, int inputs, const Matrix& matrix, const float* bias) const {
    const Share own = own_blocks();
    multiply_matrix<W>(matrix, m.planes, x, groups, s.rows, inputs, own.begin, own.end,
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
    const bool dense = layer.down.is_dense();
    Share share((m.intermediate + kLanes - 1) / kLanes);
    if (!dense) {  // who begins a group of 32 ends it
      const Share pairs(m.intermediate / kBlockInputs);
      share.begin = 2 * pairs.begin;
      share.end = 2 * pairs.end;
    }
    multiply_matrix<W>(layer.gate_up, m.planes, normed, s.normed_groups, s.rows, m.hidden, share.begin, share.end,
                [&](int row, int block, const Vec* sums) {
                  Vec gate = sums[0], up = sums[1];
                  if (layer.gate_up_bias) {
                    gate += load(layer.gate_up_bias + block * kBlockOutputs);
                    up += load(layer.gate_up_bias + block * kBlockOutputs + kLanes);
                  }
                  const Vec product = silu(gate) * up;
                  if (!dense) return keep_group(row, block, product);
                  Element* to = gated + block_place(row, block * kLanes, s.rows);
                  const int width = m.intermediate - block * kLanes;
                  if (width >= kLanes) T::narrow(to, product);
                  else for (int i = 0; i < width; ++i) to[i] = T::narrow(product[i]);
                });
    barrier.wait();
  }

  // Sixteen gated numbers: the first half of a group waits in float32 for the second.
  void keep_group(int row, int block, Vec product) const {
    float* first = static_cast<float*>(s.gated) + block_place(row, block / 2 * kBlockInputs, s.rows);
    if (block % 2 == 0) store(first, product);
    else quantize(s.gated_groups, int64_t(block / 2) * s.rows + row, m.planes, load(first), product);
  }

  void compute_logits() const {
    norm_rows(m.final_norm, s.logit_rows, s.num_logits, m.head);
    const Share share(num_blocks(m.vocab));
    multiply_matrix<W>(m.head, m.planes, normed, s.normed_groups, s.num_logits, m.hidden, share.begin, share.end,
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
    if (m.eight_bits) run_with<Int8>();
    else run_with<T>();
  }

  // C is the type of the cache.
  template <class C>
  void run_with() const {
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
      Scratch<C> scratch(padded_size(m.head_size));
      embed();
      keep_features(0);
      for (int l = 0; l < m.num_layers; ++l) {
        const Layer& layer = m.layers[l];
        norm_rows(layer.input_norm, nullptr, s.rows, layer.qkv);
        Attention own = a;
        own.key_cache = layer.key_cache;
        own.value_cache = layer.value_cache;
        own.window = layer.window;
        project_qkv(layer, own);
        if (!m.paired) rotate_and_store<C>(layer, own, scratch.heads.data());
        attend_all<C>(own, tiles, scratch, layer.output);
        project_back(normed, s.normed_groups, m.heads * m.head_size, layer.output, layer.output_bias);
        norm_rows(layer.post_norm, nullptr, s.rows, layer.gate_up);
        gate(layer);
        project_back(gated, s.gated_groups, m.intermediate, layer.down, layer.down_bias);
        keep_features(l + 1);
      }
      if (s.num_logits) compute_logits();
    }
  }
};

}  // namespace
