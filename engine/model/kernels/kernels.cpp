// What Python calls; see attention.h, linear.h and decoder.h.

#include "decoder.h"
#include "fewbit_linear.h"
#include "linear.h"

// Mirrors `_Arguments` in attention/cpu.py.
struct Arguments {
  Attention attention;
  const void *keys, *values;  // [T, G, D]
  const int64_t* slots;       // [T]
  int64_t key_stride, key_head_stride, value_stride, value_head_stride;
  int32_t rows, bfloat16, eight_bits, unused;  // of the rows, and whether the cache is in eight bits
};

// Mirrors `_Move` in attention/cpu.py.
struct Move {
  Attention store;           // of its first layer
  const int64_t *from, *to;  // [count] slots
  int64_t slots;             // of a layer
  int32_t count, layers, bfloat16, eight_bits;
};

namespace {

// T is the type of the cache, Q that of keys and values.
template <class T, class Q>
void write_cache(const Arguments& call) {
  typedef typename Q::Element Element;
  const Attention& a = call.attention;
  std::vector<typename T::Element> widened(2 * a.head_size);
  for (int t = 0; t < call.rows; ++t)
    for (int g = 0; g < a.groups; ++g) {
      const auto* key = static_cast<const Element*>(call.keys) + t * call.key_stride + g * call.key_head_stride;
      const auto* value = static_cast<const Element*>(call.values) + t * call.value_stride + g * call.value_head_stride;
      const Slot<T> slot(a, call.slots[t], g);
      if constexpr (std::is_same<T, Q>::value) {
        slot.write(key, value);
      } else {
        widen_row<Q>(widened.data(), key, a.head_size);
        widen_row<Q>(widened.data() + a.head_size, value, a.head_size);
        slot.write(widened.data(), widened.data() + a.head_size);
      }
    }
}

template <class T, class Q>
void attend_layer(const Arguments& call) {
  write_cache<T, Q>(call);
  const Attention& a = call.attention;
  const std::vector<Tile> tiles = make_tiles(a);
  std::atomic<int> next_task{0};
#pragma omp parallel
  {
    Scratch<T> scratch(padded_size(a.head_size));
    attend_in_turn<T, Q, Q>(a, scratch, tiles, [&] { return next_task++; });
  }
}

// A token's key and value of every layer, from one slot to another.
template <class T>
void move_tokens(const Move& move) {
  typedef typename T::Stored Stored;
  const int64_t layer = move.slots * move.store.groups * (move.store.head_size + kScaleBytes<T>);  // elements
  Attention a = move.store;
  for (int l = 0; l < move.layers; ++l) {
    a.key_cache = static_cast<Stored*>(move.store.key_cache) + l * layer;
    a.value_cache = static_cast<Stored*>(move.store.value_cache) + l * layer;
    for (int i = 0; i < move.count; ++i)
      for (int g = 0; g < a.groups; ++g) Slot<T>(a, move.to[i], g).copy(Slot<T>(a, move.from[i], g));
  }
}

}  // namespace

// Moves what is cached of tokens, one after the other.
extern "C" void specserve_move_tokens(const Move* move) {
  if (move->eight_bits) move_tokens<Int8>(*move);
  else if (move->bfloat16) move_tokens<BFloat16>(*move);
  else move_tokens<Float32>(*move);
}

// Writes keys and values of one layer into the cache, then attends.
extern "C" void specserve_paged_attention(const Arguments* call) {
  if (call->eight_bits && call->bfloat16) attend_layer<Int8, BFloat16>(*call);
  else if (call->eight_bits) attend_layer<Int8, Float32>(*call);
  else if (call->bfloat16) attend_layer<BFloat16, BFloat16>(*call);
  else attend_layer<Float32, Float32>(*call);
}

// One linear layer: rows of `stride` elements each, output rows side by side.
extern "C" void specserve_linear(const Linear* linear, const void* x, int64_t stride, int64_t rows, void* output) {
  if (linear->bfloat16) run_linear<BFloat16, Weights16>(*linear, x, stride, int(rows), output);
  else run_linear<Float32, Weights32>(*linear, x, stride, int(rows), output);
}

// The same for weights in few bits.
extern "C" void specserve_fewbit_linear(const FewbitLinear* linear, const void* x, int64_t stride, int64_t rows, void* output) {
  if (linear->bfloat16) run_fewbit<BFloat16>(*linear, x, stride, int(rows), output);
  else run_fewbit<Float32>(*linear, x, stride, int(rows), output);
}

// One pass of a whole decoder.
extern "C" void specserve_decode(const Decoder* decoder, const Step* step) {
  Barrier barrier;
  if (decoder->bfloat16) Forward<BFloat16, Weights16>{*decoder, *step, barrier}.run();
  else Forward<Float32, Weights32>{*decoder, *step, barrier}.run();
}

// Rows of an embedding in few bits, in float32.
extern "C" void specserve_embed(const Decoder* decoder, const int64_t* ids, int64_t count, float* rows) {
  for (int64_t i = 0; i < count; ++i)
    for (int block = 0; block < decoder->hidden / kBlockInputs; ++block, rows += kBlockInputs)
      widen_fewbit(decoder->embedding_form, decoder->embedding, decoder->hidden, ids[i], block, rows);
}

// Changes what is fast, and no result; not while a pass runs.
extern "C" void specserve_tune(const Tuning* chosen) { tuning = *chosen; }

// Which unit multiplies tiles: see `TileUnit` in tiles.h.
extern "C" int32_t specserve_tile_unit() { return int32_t(tile_unit()); }

// Bytes of a structure that Python mirrors, or -1 where the name is not known.
extern "C" int64_t specserve_size_of(const char* name) {
  const struct { const char* name; int64_t size; } known[] = {
      {"Arguments", sizeof(Arguments)}, {"Attention", sizeof(Attention)}, {"Decoder", sizeof(Decoder)},
      {"Layer", sizeof(Layer)},         {"Linear", sizeof(Linear)},       {"Move", sizeof(Move)},
      {"Step", sizeof(Step)}, {"Tuning", sizeof(Tuning)},           {"Matrix", sizeof(Matrix)},       {"FewbitLinear", sizeof(FewbitLinear)},
  };
  for (const auto& entry : known)
    if (std::strcmp(name, entry.name) == 0) return entry.size;
  return -1;
}
