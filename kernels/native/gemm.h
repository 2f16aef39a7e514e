// Linear layers. Reference: torch.nn.functional.linear with a sum in fp32.
//
// An output is one chain of fused multiply-adds over rising k, whatever the number of rows and threads: rows are taken
// in blocks of up to MAX_ROWS and threads share the output columns. A block's sums stay in registers while its panels
// stream by; meanwhile the panels that come next are fetched.
#pragma once
#include <algorithm>

#include "packed.h"
#include "threads.h"

namespace gilir {

// Activations are fp32 that hold values of the model's format T.
template <class T> struct ActivationOf { using type = float; };
template <class T> using Activation = typename ActivationOf<T>::type;

enum class Join { STORE, ADD };

template <class T> struct Linear {
  const Activation<T>* x;  // [rows, K] with zeros up to padded_k
  int64_t rows, x_stride;
  Packed<T> weight;
  const T* bias;           // [N] or null
  Join join;               // ADD: out += scale * product, both rounded to T
  float scale;
  float* out;              // [rows, N]
  int64_t out_stride;
};

// A sixth row's sums would fit into 16 registers, but what is multiplied would not fit beside them.
constexpr int MAX_ROWS = REGISTERS == 32 ? 6 : 5;
constexpr int SUMS = REGISTERS == 32 ? 24 : 6;  // of a block, in vectors of 16
constexpr int64_t ROW_BYTES = 256 << 10;  // of the rows that are multiplied with one panel after the other

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

template <class T> INLINE void write(const Linear<T>& op, int64_t row, int64_t column, f32x16 x) {
  const int count = static_cast<int>(op.weight.n - column);
  float* out = op.out + row * op.out_stride + column;
  if (op.bias != nullptr) x = x + load_part(op.bias + column, count);
  x = round_to<T>(x);
  if (op.scale != 1.0f) x = round_to<T>(x * set1(op.scale));
  if (op.join == Join::ADD) x = round_to<T>(x + load_part(out, count));
  store_part(out, x, count);
}

// What is to be fetched while a block computes: `bytes` from `data` on.
struct Ahead { const char* data; int64_t bytes; };

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

template <class T> void linear(const Linear<T>& op, int thread, int threads) {
  const Share share(op.weight.panels(), thread, threads);
  const int64_t panel_bytes = op.weight.padded_k() * PANEL * static_cast<int64_t>(sizeof(T));
  const int64_t most_rows = padded(std::max<int64_t>(ROW_BYTES / (op.x_stride * 4), 1), MAX_ROWS);
  for (int64_t row = 0; row < op.rows; row += most_rows) {
    const int64_t rows = std::min(most_rows, op.rows - row), count = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const int at_once = panels_at_once(static_cast<int>((rows + count - 1) / count));
    for (int64_t panel = share.begin; panel < share.end;) {
      const int panels = share.end - panel >= at_once ? at_once : 1;
      const int64_t next = std::min<int64_t>(panels, share.end - panel - panels) * panel_bytes;
      const char* next_data = reinterpret_cast<const char*>(op.weight.panel(panel + panels));
      for (int64_t i = 0; i < count; i++) {
        const Share part(rows, static_cast<int>(i), static_cast<int>(count));
        const Share lines(next / 64, static_cast<int>(i), static_cast<int>(count));
        any_block<T>(op, row + part.begin, static_cast<int>(part.end - part.begin), panel, panels,
                     {next_data + lines.begin * 64, (lines.end - lines.begin) * 64});
      }
      panel += panels;
    }
  }
}

}  // namespace gilir
