// Products with many rows, bound by arithmetic.
//
// A piece of a panel is made fp32 once, in a buffer that the first cache holds, for all rows of a tile. Between the
// pieces the sums lie in memory: the chain of an output is the same as if it had stayed in a register.
#pragma once
#include "gemm_few.h"

namespace gilir {

constexpr int TILE_SUM_ROWS = 6;                             // rows whose sums the registers hold at once
constexpr int TILE_PANELS = REGISTERS == 32 ? 4 : 1;
constexpr int64_t PIECE = REGISTERS == 32 ? 96 : 288;        // of K, in the fp32 buffer
constexpr int64_t TILE_BYTES = 224 << 10;                    // of the rows of a tile
constexpr int64_t TILE_ROWS = 96;

struct alignas(64) TileScratch {
  float weights[TILE_PANELS * PIECE * PANEL];
  float sums[TILE_ROWS * TILE_PANELS * PANEL];
};

// A piece of a panel where the model keeps it, or as an earlier block of rows has left it in the buffer.
template <class T> struct Piece {
  const T* packed;
  int64_t panel;  // elements from one panel to the next
  float* fp32;
  INLINE f32x16 take(int64_t panel_index, int64_t i) const {
    f32x16 x = load(packed + panel_index * panel + i * PANEL);
    store(fp32 + (panel_index * PIECE + i) * PANEL, x);
    return x;
  }
};
template <> INLINE f32x16 Piece<bf16>::take(int64_t panel_index, int64_t i) const {
  f32x16 x = load_pair(packed + panel_index * panel + (i & ~int64_t{1}) * PANEL, i & 1);
  store(fp32 + (panel_index * PIECE + i) * PANEL, x);
  return x;
}

// sums += the product of M rows with a piece of P panels. sums: [M, P * PANEL]. The first block of rows converts.
template <class T, int M, int P, bool FIRST>
__attribute__((noinline)) void tile(const float* x, int64_t stride, Piece<T> w, int64_t k, float* sums, Ahead ahead) {
  f32x16 sum[M][P];
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int p = 0; p < P; p++) sum[m][p] = load(sums + (m * P + p) * PANEL);
  const char* fetch = ahead.data;
  const char* end = ahead.data + ahead.bytes;
  for (int64_t i = 0; i < k; i += 4) {
    if (fetch < end) __builtin_prefetch(fetch, 0, 2);
    fetch += 64;
    UNROLL for (int j = 0; j < 4; j++) {
      f32x16 b[P];
      UNROLL for (int p = 0; p < P; p++) b[p] = FIRST ? w.take(p, i + j) : load(w.fp32 + (p * PIECE + i + j) * PANEL);
      UNROLL for (int m = 0; m < M; m++) {
        f32x16 a = set1(x[m * stride + i + j]);
        UNROLL for (int p = 0; p < P; p++) sum[m][p] = fma(a, b[p], sum[m][p]);
      }
      if (FIRST) asm("" : "+r"(w.packed));  // the second of a pair is loaded anew: no register is free to keep it
    }
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int p = 0; p < P; p++) store(sums + (m * P + p) * PANEL, sum[m][p]);
}

template <class T, int P, bool FIRST>
void any_tile(int rows, const float* x, int64_t stride, Piece<T> w, int64_t k, float* sums, Ahead ahead) {
  switch (rows) {
    case 1: return tile<T, 1, P, FIRST>(x, stride, w, k, sums, ahead);
    case 2: return tile<T, 2, P, FIRST>(x, stride, w, k, sums, ahead);
    case 3: return tile<T, 3, P, FIRST>(x, stride, w, k, sums, ahead);
    case 4: return tile<T, 4, P, FIRST>(x, stride, w, k, sums, ahead);
    case 5: return tile<T, 5, P, FIRST>(x, stride, w, k, sums, ahead);
    default: return tile<T, TILE_SUM_ROWS, P, FIRST>(x, stride, w, k, sums, ahead);
  }
}

// Rows `rows` times P panels from `panel` on.
template <class T, int P>
void multiply_tile(const Linear<T>& op, Share rows, int64_t panel, Ahead ahead, TileScratch& scratch) {
  const int64_t count = rows.end - rows.begin, k = op.weight.padded_k();
  const int blocks = static_cast<int>((count + TILE_SUM_ROWS - 1) / TILE_SUM_ROWS);
  const int pieces = static_cast<int>((k + PIECE - 1) / PIECE);
  std::fill(scratch.sums, scratch.sums + count * P * PANEL, 0.0f);
  for (int piece = 0; piece < pieces; piece++) {
    const Share part(k / K_MULTIPLE, piece, pieces);
    const int64_t from = part.begin * K_MULTIPLE, length = (part.end - part.begin) * K_MULTIPLE;
    const Piece<T> w{op.weight.panel(panel) + from * PANEL, k * PANEL, scratch.weights};
    for (int block = 0; block < blocks; block++) {
      const Share here(count, block, blocks), lines(ahead.bytes / 64, piece * blocks + block, pieces * blocks);
      const int here_rows = static_cast<int>(here.end - here.begin);
      const float* x = op.x + (rows.begin + here.begin) * op.x_stride + from;
      float* sums = scratch.sums + here.begin * P * PANEL;
      const Ahead fetch{ahead.data + lines.begin * 64, (lines.end - lines.begin) * 64};
      if (block == 0) any_tile<T, P, true>(here_rows, x, op.x_stride, w, length, sums, fetch);
      else any_tile<T, P, false>(here_rows, x, op.x_stride, w, length, sums, fetch);
    }
  }
  for (int64_t row = 0; row < count; row++)
    for (int p = 0; p < P; p++)
      write(op, rows.begin + row, (panel + p) * PANEL, load(scratch.sums + (row * P + p) * PANEL));
}

template <class T> void linear_of_many(const Linear<T>& op, Share share) {
  thread_local TileScratch scratch;
  const int64_t panel_bytes = op.weight.padded_k() * PANEL * static_cast<int64_t>(sizeof(T));
  const int64_t most = std::clamp<int64_t>(TILE_BYTES / (op.x_stride * 4), TILE_SUM_ROWS, TILE_ROWS);
  const int tiles = static_cast<int>((op.rows + most - 1) / most);
  for (int index = 0; index < tiles; index++) {
    const Share rows(op.rows, index, tiles);
    for (int64_t panel = share.begin; panel < share.end;) {
      const int64_t panels = share.end - panel >= TILE_PANELS ? TILE_PANELS : 1;
      const int64_t next = std::min(panels, share.end - panel - panels) * panel_bytes;
      const Ahead ahead{reinterpret_cast<const char*>(op.weight.panel(panel + panels)), next};
      if (panels == TILE_PANELS) multiply_tile<T, TILE_PANELS>(op, rows, panel, ahead, scratch);
      else multiply_tile<T, 1>(op, rows, panel, ahead, scratch);
      panel += panels;
    }
  }
}

}  // namespace gilir
