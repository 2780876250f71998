// One linear layer in few bits for rows that lie as torch has them.
#pragma once

#include "fewbit.h"
#include "linear.h"

// Mirrors `_FewbitLinear` in fewbit_linear.py.
struct FewbitLinear {
  const void* packed;
  const float* bias;  // padded to blocks, or null
  int32_t inputs, outputs, form, planes, bfloat16, unused;
};

namespace {

template <class T>
void run_fewbit(const FewbitLinear& l, const void* input, int64_t stride, int rows, void* output) {
  typedef typename T::Element Element;
  const auto* x = static_cast<const Element*>(input);
  const int count = l.inputs / kBlockInputs;
  const std::unique_ptr<char[]> groups(new char[count * rows * group_bytes(l.planes)]);
  Barrier barrier;
#pragma omp parallel if (int64_t(rows) * l.inputs * l.outputs >= kWorthSharing)
  {
    const Share own(count);
    for (int g = own.begin; g < own.end; ++g)
      for (int64_t r = 0; r < rows; ++r) {
        const Element* from = x + r * stride + g * kBlockInputs;
        quantize(groups.get(), int64_t(g) * rows + r, l.planes, T::widen(from), T::widen(from + kLanes));
      }
    barrier.wait();
    const Share share(num_blocks(l.outputs));
    multiply_fewbit(l.form, l.planes, groups.get(), rows, l.inputs, l.packed, share.begin, share.end,
                    [&](int row, int block, const Vec* sums) {
                      Vec first = sums[0], second = sums[1];
                      const int at = block * kBlockOutputs;
                      if (l.bias) {
                        first += load(l.bias + at);
                        second += load(l.bias + at + kLanes);
                      }
                      store_block<T>(static_cast<Element*>(output) + int64_t(row) * l.outputs + at, l.outputs - at, first, second);
                    });
  }
}

}  // namespace
