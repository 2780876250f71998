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
  int32_t rows, bfloat16;
};

namespace {

template <class T>
void write_cache(const Arguments& call) {
  typedef typename T::Element Element;
  const Attention& a = call.attention;
  for (int t = 0; t < call.rows; ++t)
    for (int g = 0; g < a.groups; ++g) {
      const Slot<T> slot(a, call.slots[t], g);
      slot.write_key(0, a.head_size, (const Element*)call.keys + t * call.key_stride + g * call.key_head_stride);
      slot.write_value(0, a.head_size, (const Element*)call.values + t * call.value_stride + g * call.value_head_stride);
    }
}

template <class T>
void attend_layer(const Arguments& call) {
  write_cache<T>(call);
  const Attention& a = call.attention;
  const std::vector<Tile> tiles = make_tiles(a);
  std::atomic<int> next_task{0};
#pragma omp parallel
  {
    Scratch<T> scratch(padded_size(a.head_size));
    attend_in_turn<T, T>(a, scratch, tiles, [&] { return next_task++; });
  }
}

}  // namespace

// Writes keys and values of one layer into the cache, then attends.
extern "C" void specserve_paged_attention(const Arguments* call) {
  if (call->bfloat16) attend_layer<BFloat16>(*call);
  else attend_layer<Float32>(*call);
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

// Bytes of a structure that Python mirrors, or -1 where the name is not known.
extern "C" int64_t specserve_size_of(const char* name) {
  const struct { const char* name; int64_t size; } known[] = {
      {"Arguments", sizeof(Arguments)}, {"Attention", sizeof(Attention)}, {"Decoder", sizeof(Decoder)},
      {"Layer", sizeof(Layer)},         {"Linear", sizeof(Linear)},       {"Step", sizeof(Step)},
      {"FewbitLinear", sizeof(FewbitLinear)},
  };
  for (const auto& entry : known)
    if (std::strcmp(name, entry.name) == 0) return entry.size;
  return -1;
}
