// What a decoder's pass is given: weights, and buffers.
#pragma once

#include "fewbit.h"
#include "pages.h"

// Blocks of outputs that one form holds, up to the block `end`.
struct Piece {
  const void* packed;
  int32_t form, end;
};

// Mirrors `_Matrix` in matrices.py: a weight whose first pieces hold all of its blocks. One piece is
// in kDense (float32 or bfloat16, see matmul.h), or any number are in few bits.
struct Matrix {
  Piece pieces[3];
  bool is_dense() const { return pieces[0].form == kDense; }
};

// Mirrors `_Layer` in native_decoder.py. Pointers may be null where the model has no such part.
struct Layer {
  const float *input_norm, *post_norm;  // [hidden]
  // Gate and up alternate by 16 outputs, and so do both halves of a query or key if `paired`.
  Matrix qkv, output, gate_up, down;
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;  // padded to blocks
  const float *query_norm, *key_norm;  // [head_size]
  void *key_cache, *value_cache;  // see attention.h
  int32_t window, unused;
};

// Mirrors `_Decoder` in native_decoder.py.
struct Decoder {
  const Layer* layers;
  const void* embedding;  // [V, hidden] in the type of activations, or packed
  const float* final_norm;
  Matrix head;  // [V, hidden]
  const float *cosines, *sines;  // [max_len, head_size]
  int32_t num_layers, hidden, intermediate, vocab;
  int32_t heads, groups, head_size, bfloat16;
  float epsilon, scale;
  int32_t paired;  // never with a cache in eight bits, whose scales need all of a key
  int32_t planes, embedding_form;  // see quantized.h; kDense or another form of fewbit.h
  int32_t eight_bits;  // whether the cache is: see eight_bits.h
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
  void* gated;                // [intermediate / 32, T, 32]; as normed and queries in the type of activations
  void *normed_groups, *gated_groups;  // the same two for matrices in few bits, see quantized.h
  float* logits;    // [R, V]
  float* features;  // [F, T, hidden], the residual stream after each of `feature_layers` [F]
  const int32_t* feature_layers;  // 0 = embeddings, i = after i layers
  int32_t rows, num_logits, sequences, table_width, page_size, num_features, num_branches, unused;
};

namespace {

// One thread's share [begin, end) of the blocks, for all rows: calls finish(row, block, sums[2]).
// Rows are in blocks or in groups, as the matrix wants them.
template <class W, class Finish>
void multiply_matrix(const Matrix& matrix, int planes, const void* x, const void* groups, int rows, int inputs, int begin,
                     int end, const Finish& finish) {
  typedef typename W::Element Element;
  if (matrix.is_dense())
    return multiply<W>(static_cast<const Element*>(x), rows, inputs, static_cast<const Element*>(matrix.pieces[0].packed),
                       begin, end, finish);
  int from = 0;
  for (const Piece& piece : matrix.pieces) {
    const int first = begin > from ? begin : from, last = end < piece.end ? end : piece.end;
    if (first < last)
      multiply_fewbit(piece.form, planes, groups, rows, inputs, piece.packed, first - from, last - from,
                      [&](int row, int block, const Vec* sums) { finish(row, from + block, sums); });
    from = piece.end;
  }
}

}  // namespace
