// A whole decoder of the Llama family in one call: no allocation, no dispatch, few barriers.
#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>

#include "attention.h"
#include "matmul.h"

// Mirrors `_Layer` in fused.py. Pointers may be null where the model has no such part.
struct Layer {
  const float *input_norm, *post_norm;  // [hidden]
  const void *qkv, *output, *gate_up, *down;  // packed; gate and up alternate by 16 outputs
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;  // padded to blocks
  const float *query_norm, *key_norm;  // [head_size]
  void *key_cache, *value_cache;  // see attention.h
  int32_t window, unused;
};

// Mirrors `_Decoder` in fused.py.
struct Decoder {
  const Layer* layers;
  const void* embedding;  // [V, hidden] in the weights' type
  const float* final_norm;
  const void* head;  // packed [V, hidden]
  const float *cosines, *sines;  // [max_len, head_size]
  int32_t num_layers, hidden, intermediate, vocab;
  int32_t heads, groups, head_size, bfloat16;
  float epsilon, scale;
};

// Mirrors `_Step` in fused.py: one packed batch and the buffers it needs.
struct Step {
  const int64_t *input_ids, *positions, *slots;  // [T]
  const int64_t* logit_rows;  // [R]
  const int32_t *query_starts, *context_lengths, *page_tables;
  float* residual;  // [T, hidden]
  void* normed;     // [T, max(hidden, heads * head_size)] in the weights' type
  float* qkv;       // [T, (heads + 2 * groups) * head_size], padded to blocks
  void* gated;      // [T, intermediate] in the weights' type
  float* logits;    // [R, V]
  int32_t rows, num_logits, sequences, table_width, page_size, unused;
};

namespace {

// Where the threads of a pass wait for each other, hundreds of times per step. OpenMP's own
// barrier spins for milliseconds: on a busy machine the spinning thread then keeps the core from
// the very thread it waits for. This one spins for some microseconds and then gives way.
class Barrier {
 public:
  void wait() {
    const int phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == omp_get_num_threads() - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_task_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < kSpins) relax();
      else sched_yield();
    }
  }

  // The next of a phase's tasks, which threads take in turn.
  int next_task() { return next_task_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static constexpr int kSpins = 2000;
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
  alignas(64) std::atomic<int> next_task_{0};
};

// An even share of [0, count) for this thread.
struct Share {
  int begin, end;
  explicit Share(int count) {
    const int64_t n = omp_get_num_threads(), i = omp_get_thread_num();
    begin = int(count * i / n);
    end = int(count * (i + 1) / n);
  }
};

inline int num_blocks(int outputs) { return (outputs + kBlockOutputs - 1) / kBlockOutputs; }

// 1 / sqrt(mean(x^2) + epsilon), summed in one fixed order.
inline float inverse_rms(const float* x, int size, float epsilon) {
  Vec squares = Vec{};
  int d = 0;
  for (; d + kLanes <= size; d += kLanes) squares += load(x + d) * load(x + d);
  float total = sum(squares);
  for (; d < size; ++d) total += x[d] * x[d];
  return 1.0f / std::sqrt(total / size + epsilon);
}

template <class T>
inline void rms_norm(typename T::Element* to, const float* x, const float* weight, int size, float epsilon) {
  const float factor = inverse_rms(x, size, epsilon);
  narrow_row<T>(to, size, [&](int d) { return load(x + d) * factor * load(weight + d); },
                [&](int d) { return x[d] * factor * weight[d]; });
}

// The first `width` lanes of x are added to memory.
inline void add(float* to, Vec x, int width) {
  if (width >= kLanes) store(to, load(to) + x);
  else for (int i = 0; i < width; ++i) to[i] += x[i];
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

template <class T, class W>
struct Forward {
  typedef typename T::Element Element;
  const Decoder& m;
  const Step& s;
  Barrier& barrier;
  const int padded_qkv = num_blocks((m.heads + 2 * m.groups) * m.head_size) * kBlockOutputs;
  Element* const normed = static_cast<Element*>(s.normed);
  Element* const gated = static_cast<Element*>(s.gated);

  void norm_rows(const float* weight) const {
    const Share share(s.rows);
    for (int t = share.begin; t < share.end; ++t)
      rms_norm<T>(normed + int64_t(t) * m.hidden, s.residual + int64_t(t) * m.hidden, weight, m.hidden, m.epsilon);
    barrier.wait();
  }

  void embed() const {
    const Share share(s.rows);
    for (int t = share.begin; t < share.end; ++t)
      widen_row<T>(s.residual + int64_t(t) * m.hidden,
                   static_cast<const Element*>(m.embedding) + s.input_ids[t] * m.hidden, m.hidden);
    barrier.wait();
  }

  void project_qkv(const Layer& layer) const {
    const Share share(padded_qkv / kBlockOutputs);
    multiply<W>(normed, s.rows, m.hidden, static_cast<const Element*>(layer.qkv), share.begin, share.end,
                [&](int row, int block, const Vec* sums) {
                  float* to = s.qkv + int64_t(row) * padded_qkv + block * kBlockOutputs;
                  for (int i = 0; i < 2; ++i)
                    store(to + i * kLanes, layer.qkv_bias
                              ? sums[i] + load(layer.qkv_bias + block * kBlockOutputs + i * kLanes) : sums[i]);
                });
    barrier.wait();
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
      for (int h = 0; h < m.heads; ++h) turn(t, h, layer.query_norm);
    // Group by group: the tokens of a page write to the same cache lines.
    const Share share(s.rows * m.groups);
    for (int i = share.begin; i < share.end; ++i) {
      const int g = i / s.rows, t = i % s.rows;
      const float* key = turn(t, m.heads + g, layer.key_norm);
      narrow_row<T>(scratch, key, size);
      narrow_row<T>(scratch + size, key + m.groups * size, size);
      write_token<T>(a, s.slots[t], g, scratch, scratch + size);
    }
    barrier.wait();
  }

  void attend_all(const Attention& a, const std::vector<Tile>& tiles, Scratch<T>& scratch) const {
    attend_in_turn<T, Float32>(a, scratch, tiles, [&] { return barrier.next_task(); });
    barrier.wait();
  }

  // residual += x W^T + bias
  void project_back(const Element* x, int inputs, const void* packed, const float* bias) const {
    const Share share(num_blocks(m.hidden));
    multiply<W>(x, s.rows, inputs, static_cast<const Element*>(packed), share.begin, share.end,
                [&](int row, int block, const Vec* sums) {
                  float* to = s.residual + int64_t(row) * m.hidden + block * kBlockOutputs;
                  const int width = m.hidden - block * kBlockOutputs;
                  for (int i = 0; i < 2; ++i) {
                    const Vec sum = bias ? sums[i] + load(bias + block * kBlockOutputs + i * kLanes) : sums[i];
                    add(to + i * kLanes, sum, width - i * kLanes);
                  }
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
                  Element* to = gated + int64_t(row) * m.intermediate + block * kLanes;
                  const int width = m.intermediate - block * kLanes;
                  if (width >= kLanes) T::narrow(to, product);
                  else for (int i = 0; i < width; ++i) to[i] = T::narrow(product[i]);
                });
    barrier.wait();
  }

  void compute_logits() const {
    const Share rows(s.num_logits);
    for (int r = rows.begin; r < rows.end; ++r)
      rms_norm<T>(normed + int64_t(r) * m.hidden, s.residual + s.logit_rows[r] * m.hidden, m.final_norm, m.hidden, m.epsilon);
    barrier.wait();
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
    a.queries = s.qkv;
    a.output = s.normed;
    a.query_starts = s.query_starts;
    a.context_lengths = s.context_lengths;
    a.page_tables = s.page_tables;
    a.query_stride = padded_qkv;
    a.query_head_stride = m.head_size;
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
      for (int l = 0; l < m.num_layers; ++l) {
        const Layer& layer = m.layers[l];
        norm_rows(layer.input_norm);
        project_qkv(layer);
        Attention own = a;
        own.key_cache = layer.key_cache;
        own.value_cache = layer.value_cache;
        own.window = layer.window;
        rotate_and_store(layer, own, scratch.heads.data());
        attend_all(own, tiles, scratch);
        project_back(normed, m.heads * m.head_size, layer.output, layer.output_bias);
        norm_rows(layer.post_norm);
        gate(layer);
        project_back(gated, m.intermediate, layer.down, layer.down_bias);
      }
      if (s.num_logits) compute_logits();
    }
  }
};

}  // namespace
