// One linear layer of any width for rows that lie as torch has them: Y = X W^T + b.
#pragma once

#include <memory>

#include "matmul.h"
#include "threads.h"

// Mirrors `_Linear` in linear.py.
struct Linear {
  const void* packed;  // see matmul.h; bfloat16 has an even number of inputs, the last may be padding
  const float* bias;   // padded to blocks, or null
  int32_t inputs, outputs, bfloat16, unused;
};

namespace {

constexpr int64_t kWorthSharing = 1 << 17;  // products below which threads would cost more than they bring

// X [rows, inputs] in blocks, for this thread's share of them; widths that no step takes whole end in zeros.
template <class Element>
void copy_blocks(Element* to, const Element* x, int64_t stride, int rows, int inputs) {
  const Share own(num_blocks(inputs));
  for (int block = own.begin; block < own.end; ++block) {
    const int first = block * kBlockInputs, left = inputs - first, width = left < kBlockInputs ? left : kBlockInputs;
    for (int64_t r = 0; r < rows; ++r) {
      Element* place = to + block_place(r, first, rows);
      std::memcpy(place, x + r * stride + first, sizeof(Element) * width);
      if (width < kBlockInputs) place[width] = Element{};
    }
  }
}

// Stores the outputs of a block that exist.
template <class T>
inline void store_block(typename T::Element* to, int width, Vec first, Vec second) {
  if (width >= kBlockOutputs) {
    T::narrow(to, first);
    T::narrow(to + kLanes, second);
  } else {
    for (int i = 0; i < width; ++i) to[i] = T::narrow(i < kLanes ? first[i] : second[i - kLanes]);
  }
}

template <class T, class W>
void run_linear(const Linear& l, const void* input, int64_t stride, int rows, void* output) {
  typedef typename T::Element Element;
  const auto* x = static_cast<const Element*>(input);
  const int inputs = (l.inputs + W::kInputsPerStep - 1) / W::kInputsPerStep * W::kInputsPerStep;
  const bool as_it_is = rows == 1 && inputs == l.inputs;  // a single row is in blocks already
  const std::unique_ptr<Element[]> copy(as_it_is ? nullptr : new Element[int64_t(num_blocks(inputs)) * kBlockInputs * rows]);
  Barrier barrier;
#pragma omp parallel if (int64_t(rows) * inputs * l.outputs >= kWorthSharing)
  {
    if (!as_it_is) {
      copy_blocks(copy.get(), x, stride, rows, l.inputs);
      barrier.wait();
    }
    const Share share(num_blocks(l.outputs));
    multiply<W>(as_it_is ? x : copy.get(), rows, inputs, static_cast<const Element*>(l.packed), share.begin, share.end,
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
