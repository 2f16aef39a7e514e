// Products in bf16 with the dot products of AVX512-BF16, for few rows and for many.
//
// An output is one chain over rising pairs of K. A tile's rows become bf16 once, which is exact. With more rows than
// the registers hold sums for, a piece of a few panels stays in the first cache for all of them, and the sums lie in
// memory between the pieces: the chain of an output is the same as if it had stayed in a register.
#pragma once
#include "bf16_rows.h"
#include "dot.h"

namespace gilir {

// Of the 32 registers, 24 hold sums and 4 weights.
constexpr int DOT_ROWS = 6, DOT_PANELS = 4;
constexpr int64_t DOT_PIECE = 160;             // of K: 20 KiB of four panels
constexpr int64_t DOT_TILE_BYTES = 384 << 10;  // of the rows of a tile, in the second cache
constexpr int64_t DOT_LEAST_TILE = 24, DOT_LARGEST_TILE = 96;  // rows: each weight that is fetched serves so many

// An odd number of cache lines, as `row_stride`.
inline int64_t dot_stride(int64_t k) { return (k / K_MULTIPLE | 1) * K_MULTIPLE; }
inline int64_t dot_rows(int64_t k) {
  return std::clamp<int64_t>(DOT_TILE_BYTES / (dot_stride(k) * 2), DOT_LEAST_TILE, DOT_LARGEST_TILE);
}

// Rows of activations, and the sums of a tile; one a thread.
struct LinearScratch {
  Bf16Rows rows;
  alignas(64) float sums[DOT_LARGEST_TILE * DOT_PANELS * PANEL];

  // Before the threads begin. k: padded.
  void reserve(int64_t k) { rows.reserve(dot_rows(k) * dot_stride(k)); }
};

// sums += the product of M rows with a piece of P panels, `panel` elements apart. sums: [M, P * PANEL].
template <int M, int P>
__attribute__((noinline)) void dot_tile(const bf16* x, int64_t stride, const bf16* w, int64_t panel, int64_t k,
                                        float* sums, Ahead ahead) {
  f32x16 sum[M][P];
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int p = 0; p < P; p++) sum[m][p] = load(sums + (m * P + p) * PANEL);
  const int64_t step = padded((ahead.bytes * K_MULTIPLE + k - 1) / k, 64);
  int64_t fetched = 0;
  for (int64_t first = 0; first < k; first += K_MULTIPLE) {
    for (int64_t end = std::min(fetched + step, ahead.bytes); fetched < end; fetched += 64)
      __builtin_prefetch(ahead.data + fetched, 0, 2);
    for (int64_t i = first; i < first + K_MULTIPLE; i += 2) {
      bf16x32 b[P];
      UNROLL for (int p = 0; p < P; p++) b[p] = load_pairs(w + p * panel + i * PANEL);
      UNROLL for (int m = 0; m < M; m++) {
        bf16x32 a = set1_pair(x + m * stride + i);
        UNROLL for (int p = 0; p < P; p++) sum[m][p] = dot(sum[m][p], a, b[p]);
      }
    }
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int p = 0; p < P; p++) store(sums + (m * P + p) * PANEL, sum[m][p]);
}

template <int P>
void any_dot_tile(int rows, const bf16* x, int64_t stride, const bf16* w, int64_t panel, int64_t k, float* sums,
                  Ahead ahead) {
  switch (rows) {
    case 1: return dot_tile<1, P>(x, stride, w, panel, k, sums, ahead);
    case 2: return dot_tile<2, P>(x, stride, w, panel, k, sums, ahead);
    case 3: return dot_tile<3, P>(x, stride, w, panel, k, sums, ahead);
    case 4: return dot_tile<4, P>(x, stride, w, panel, k, sums, ahead);
    case 5: return dot_tile<5, P>(x, stride, w, panel, k, sums, ahead);
    default: return dot_tile<DOT_ROWS, P>(x, stride, w, panel, k, sums, ahead);
  }
}

// Rows `rows`, which lie in the scratch `stride` apart, times P panels from `panel` on.
template <int P>
void multiply_dots(const Linear<bf16>& op, Share rows, int64_t stride, int64_t panel, Ahead ahead,
                   LinearScratch& scratch) {
  const int64_t count = rows.end - rows.begin, k = op.weight.padded_k();
  const int blocks = static_cast<int>((count + DOT_ROWS - 1) / DOT_ROWS);
  const int pieces = blocks == 1 ? 1 : static_cast<int>((k + DOT_PIECE - 1) / DOT_PIECE);
  std::fill(scratch.sums, scratch.sums + count * P * PANEL, 0.0f);
  for (int piece = 0; piece < pieces; piece++) {
    const Share part(k / K_MULTIPLE, piece, pieces);
    const int64_t from = part.begin * K_MULTIPLE, length = (part.end - part.begin) * K_MULTIPLE;
    const bf16* w = op.weight.panel(panel) + from * PANEL;
    for (int block = 0; block < blocks; block++) {
      const Share here(count, block, blocks), lines(ahead.bytes / 64, piece * blocks + block, pieces * blocks);
      any_dot_tile<P>(static_cast<int>(here.end - here.begin), scratch.rows.data.data() + here.begin * stride + from, stride,
                      w, k * PANEL, length, scratch.sums + here.begin * P * PANEL,
                      {ahead.data + lines.begin * 64, (lines.end - lines.begin) * 64});
    }
  }
  for (int64_t row = 0; row < count; row++)
    for (int p = 0; p < P; p++)
      write(op, rows.begin + row, (panel + p) * PANEL, load(scratch.sums + (row * P + p) * PANEL));
}

inline void linear_by_dots(const Linear<bf16>& op, Share share, LinearScratch& scratch) {
  const int64_t k = op.weight.padded_k(), panel_bytes = k * PANEL * static_cast<int64_t>(sizeof(bf16));
  const int64_t stride = dot_stride(k), most = dot_rows(k);
  const int tiles = static_cast<int>((op.rows + most - 1) / most);
  for (int index = 0; index < tiles; index++) {
    const Share rows(op.rows, index, tiles);
    scratch.rows.take(op, rows.begin, rows.end, stride);
    for (int64_t panel = share.begin, panels; panel < share.end; panel += panels) {
      panels = share.end - panel >= DOT_PANELS ? DOT_PANELS : 1;
      const int64_t next = std::min(panels, share.end - panel - panels) * panel_bytes;
      const Ahead ahead{reinterpret_cast<const char*>(op.weight.panel(panel + panels)), next};
      if (panels == DOT_PANELS) multiply_dots<DOT_PANELS>(op, rows, stride, panel, ahead, scratch);
      else multiply_dots<1>(op, rows, stride, panel, ahead, scratch);
    }
  }
}

}  // namespace gilir
