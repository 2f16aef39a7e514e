// Gated activations. Reference: kernels/gated_activation.py.
#pragma once
#include "gemm.h"

namespace gilir {

enum class Activate { SILU, GELU_TANH, CLAMPED_SWIGLU };

INLINE f32x16 activated(f32x16 x, Activate kind) {
  if (kind == Activate::SILU) return x / (exp(zero() - x) + set1(1.0f));
  f32x16 inner = (x * x * x * set1(0.044715f) + x) * set1(0.7978845608028654f);
  return (tanh(inner) + set1(1.0f)) * x * set1(0.5f);
}

// Of GPT-OSS. NaN stays NaN.
INLINE f32x16 clamped_swiglu(f32x16 gate, f32x16 up) {
  gate = where_less(zero() - gate, -7.0f, 7.0f, gate);
  up = where_less(zero() - up, -7.0f, 7.0f, where_less(up, -7.0f, -7.0f, up));
  return (up + set1(1.0f)) * (gate / (exp(gate * set1(-1.702f)) + set1(1.0f)));
}

// gate_up: [2 * width], the gate first; out: [width].
template <class T, class A> void gated_row(const A* gate_up, int64_t width, Activate kind, A* out) {
  for (int64_t i = 0; i < width; i += LANES) {
    const int count = static_cast<int>(width - i);
    f32x16 gate = load_part(gate_up + i, count), up = load_part(gate_up + width + i, count);
    f32x16 y = kind == Activate::CLAMPED_SWIGLU ? clamped_swiglu(gate, up) : round_to<T>(activated(gate, kind)) * up;
    store_part(out + i, round_to<T>(y), count);
  }
}

}  // namespace gilir
