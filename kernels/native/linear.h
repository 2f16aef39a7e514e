// What a linear layer is given, and how it writes what it has summed up. Reference: torch.nn.functional.linear with a
// sum in fp32.
#pragma once
#include <algorithm>

#include "packed.h"
#include "threads.h"

namespace gilir {

// Activations are fp32 that hold values of the model's format T.
using Activation = float;

// Columns from one row of activations to the next. An odd number of cache lines: rows that are read side by side would
// otherwise meet in few sets of the first cache.
INLINE int64_t row_stride(int64_t width) { return (padded(width, K_MULTIPLE) / LANES | 1) * LANES; }

enum class Join { STORE, ADD };

template <class T> struct Linear {
  const Activation* x;  // [rows, K] with zeros up to padded_k
  int64_t rows, x_stride;
  Packed<T> weight;
  const T* bias;           // [N] or null
  Join join;               // ADD: out += scale * product, both rounded to T
  float scale;
  float* out;              // [rows, N]
  int64_t out_stride;
};

// The sums of 16 columns, rounded to the model's format T, joined and stored. Op: a `Linear`, whatever its weight.
template <class T, class Op> INLINE void finish(const Op& op, int64_t row, int64_t column, f32x16 x) {
  const int count = static_cast<int>(op.weight.n - column);
  float* out = op.out + row * op.out_stride + column;
  if (op.bias != nullptr) x = x + load_part(op.bias + column, count);
  x = round_to<T>(x);
  if (op.scale != 1.0f) x = round_to<T>(x * set1(op.scale));
  if (op.join == Join::ADD) x = round_to<T>(x + load_part(out, count));
  store_part(out, x, count);
}

template <class T> INLINE void write(const Linear<T>& op, int64_t row, int64_t column, f32x16 x) {
  finish<T>(op, row, column, x);
}

// What is to be fetched while a block computes: `bytes` from `data` on.
struct Ahead { const char* data; int64_t bytes; };

}  // namespace gilir
