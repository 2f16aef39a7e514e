// Products with few rows, bound by the memory: panels are read as they lie there, once each.
#pragma once
#include "linear.h"

namespace gilir {

// A sixth row's sums would fit into 16 registers, but what is multiplied would not fit beside them.
constexpr int MAX_ROWS = REGISTERS == 32 ? 6 : 5;
constexpr int64_t FEW_ROWS = 2 * MAX_ROWS;
constexpr int SUMS = REGISTERS == 32 ? 24 : 6;  // of a block, in vectors of 16
// Adds the product of M rows and P panels to `sum`.
template <int M, int P>
INLINE void multiply(const float* x, int64_t stride, const bf16* w, int64_t panel, int64_t k, f32x16 (&sum)[M][P]) {
  for (int64_t i = 0; i < k; i += 2) {
    UNROLL for (int odd = 0; odd < 2; odd++) {
      f32x16 b[P];
      UNROLL for (int p = 0; p < P; p++) b[p] = load_pair(w + p * panel + i * PANEL, odd);
      UNROLL for (int m = 0; m < M; m++) {
        f32x16 a = set1(x[m * stride + i + odd]);
        UNROLL for (int p = 0; p < P; p++) sum[m][p] = fma(a, b[p], sum[m][p]);
      }
      asm("" : "+r"(w));  // the second of the pairs is loaded anew: there is no register to keep it in
    }
  }
}
template <int M, int P, class T>
INLINE void multiply(const float* x, int64_t stride, const T* w, int64_t panel, int64_t k, f32x16 (&sum)[M][P]) {
  for (int64_t i = 0; i < k; i++) {
    f32x16 b[P];
    UNROLL for (int p = 0; p < P; p++) b[p] = load(w + p * panel + i * PANEL);
    UNROLL for (int m = 0; m < M; m++) {
      f32x16 a = set1(x[m * stride + i]);
      UNROLL for (int p = 0; p < P; p++) sum[m][p] = fma(a, b[p], sum[m][p]);
    }
  }
}

template <class T, int M, int P>
__attribute__((noinline)) void block(const Linear<T>& op, int64_t row, int64_t first_panel, Ahead ahead) {
  f32x16 sum[M][P];
  UNROLL for (int m = 0; m < M; m++) UNROLL for (int p = 0; p < P; p++) sum[m][p] = zero();
  const int64_t k = op.weight.padded_k(), panel = k * PANEL;
  const float* x = op.x + row * op.x_stride;
  const T* w = op.weight.panel(first_panel);
  const int64_t step = padded((ahead.bytes * K_MULTIPLE + k - 1) / k, 64);
  int64_t fetched = 0;
  for (int64_t i = 0; i < k; i += K_MULTIPLE) {
    for (int64_t end = std::min(fetched + step, ahead.bytes); fetched < end; fetched += 64)
      __builtin_prefetch(ahead.data + fetched, 0, 2);
    multiply<M, P>(x + i, op.x_stride, w + i * PANEL, panel, K_MULTIPLE, sum);
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int p = 0; p < P; p++) write(op, row + m, (first_panel + p) * PANEL, sum[m][p]);
}

// Panels that a block of M rows takes at once: as many sums as the registers hold.
constexpr int panels_at_once(int rows) {
  int panels = 1;
  while (panels < 4 && 2 * panels * rows <= SUMS) panels *= 2;
  return panels;
}

template <class T, int M> void blocks(const Linear<T>& op, int64_t row, int64_t panel, int panels, Ahead ahead) {
  if constexpr (panels_at_once(M) >= 4)
    if (panels == 4) return block<T, M, 4>(op, row, panel, ahead);
  if constexpr (panels_at_once(M) >= 2)
    if (panels == 2) return block<T, M, 2>(op, row, panel, ahead);
  block<T, M, 1>(op, row, panel, ahead);
}

template <class T>
void any_block(const Linear<T>& op, int64_t row, int rows, int64_t panel, int panels, Ahead ahead) {
  switch (rows) {
    case 1: return blocks<T, 1>(op, row, panel, panels, ahead);
    case 2: return blocks<T, 2>(op, row, panel, panels, ahead);
    case 3: return blocks<T, 3>(op, row, panel, panels, ahead);
    case 4: return blocks<T, 4>(op, row, panel, panels, ahead);
    case 5: return blocks<T, 5>(op, row, panel, panels, ahead);
    default: return blocks<T, MAX_ROWS>(op, row, panel, panels, ahead);
  }
}

template <class T> void linear_of_few(const Linear<T>& op, Share share) {
  const int64_t panel_bytes = op.weight.padded_k() * PANEL * static_cast<int64_t>(sizeof(T));
  const int64_t count = (op.rows + MAX_ROWS - 1) / MAX_ROWS;
  const int at_once = panels_at_once(static_cast<int>((op.rows + count - 1) / count));
  for (int64_t panel = share.begin; panel < share.end;) {
    const int panels = share.end - panel >= at_once ? at_once : 1;
    const int64_t next = std::min<int64_t>(panels, share.end - panel - panels) * panel_bytes;
    const char* next_data = reinterpret_cast<const char*>(op.weight.panel(panel + panels));
    for (int64_t i = 0; i < count; i++) {
      const Share part(op.rows, static_cast<int>(i), static_cast<int>(count));
      const Share lines(next / 64, static_cast<int>(i), static_cast<int>(count));
      any_block<T>(op, part.begin, static_cast<int>(part.end - part.begin), panel, panels,
                   {next_data + lines.begin * 64, (lines.end - lines.begin) * 64});
    }
    panel += panels;
  }
}

}  // namespace gilir
