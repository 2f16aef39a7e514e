// Root-mean-square norm. Reference: kernels/rms_norm.py, with its places of rounding.
#pragma once
#include "gemm.h"

namespace gilir {

// x, out: [width]; may be the same. weight: [width].
template <class T, class A>
void rms_norm_row(const A* x, const T* weight, int64_t width, float eps, bool unit_offset, A* out) {
  f32x16 squares = zero();
  for (int64_t i = 0; i < width; i += LANES) {
    f32x16 v = load_part(x + i, static_cast<int>(width - i));
    squares = fma(v, v, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(width);
  const f32x16 scale = set1(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < width; i += LANES) {
    const int count = static_cast<int>(width - i);
    f32x16 normed = load_part(x + i, count) * scale, w = load_part(weight + i, count);
    f32x16 y = unit_offset ? normed * (set1(1.0f) + w) : w * round_to<T>(normed);
    store_part(out + i, round_to<T>(y), count);
  }
}

}  // namespace gilir
