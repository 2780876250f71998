// What is fast on one processor and slow on another. Chosen at start, by timing passes: see tuning.py.
// None of it changes a result.
#pragma once

#include <cstdint>

// Mirrors `_Tuning` in tuning.py. Weights are fetched into the cache so long before their use ...
struct Tuning {
  int32_t dense_ahead;    // ... in steps of a dense product, by a single tile ...
  int32_t dense_fetched;  // ... of so many rows or more: with fewer, some processors look ahead by themselves
  int32_t fewbit_ahead;   // ... in groups of inputs, by a single tile of rows in few bits
  int32_t fewbit_rows;    // most rows of such a tile; 0 = as many as registers have room for
};

namespace {

Tuning tuning = {48, 7, 12, 0};

}  // namespace
