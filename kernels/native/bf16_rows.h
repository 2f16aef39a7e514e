// Rows of activations as bf16, which AMX and AVX512-BF16 multiply. Exact: they hold values of that format.
#pragma once
#include <vector>

#include "linear.h"

namespace gilir {

struct Bf16Rows {
  std::vector<bf16> data;

  // Room for so many numbers. Throws std::bad_alloc: not for use in a thread of the pool.
  void reserve(int64_t count) { data.resize(std::max(data.size(), static_cast<size_t>(count))); }

  // Takes the rows begin .. end - 1, and puts them `stride` numbers apart.
  void take(const Linear<bf16>& op, int64_t begin, int64_t end, int64_t stride) {
    for (int64_t row = begin; row < end; row++)
      for (int64_t i = 0; i < op.weight.padded_k(); i += LANES)
        store(data.data() + (row - begin) * stride + i, load(op.x + row * op.x_stride + i));
  }
};

}  // namespace gilir
