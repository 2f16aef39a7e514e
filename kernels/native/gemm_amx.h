// Products in bf16 with the tiles of AMX.
//
// Tiles 0 to 3 hold sums, 4 and 5 rows of activations, 6 and 7 a step of 32 of a panel. A row of a tile is summed up by
// itself in rising steps of K, so its bits hang neither on the rows beside it nor on how many panels go at once.
#pragma once
#include "amx.h"
#include "bf16_rows.h"

namespace gilir {

constexpr int TILE_HEIGHT = 16;
constexpr int64_t AMX_BYTES = 768 << 10;  // of the rows that are multiplied with one panel after the other

// Rows that are multiplied with one panel after the other.
inline int64_t amx_rows(int64_t k) {
  const int64_t step = 2 * TILE_HEIGHT;
  return std::max(AMX_BYTES / (k * 2) / step, int64_t{1}) * step;
}

// Rows of activations, and the sums of a block; one a thread.
struct LinearScratch {
  Bf16Rows rows;
  alignas(64) float sums[4][TILE_HEIGHT * PANEL];
  TileConfig config;

  // Before the threads begin. k: padded.
  void reserve(int64_t k) { rows.reserve(amx_rows(k) * k); }
};

// `first` and `second` rows in the two row tiles and in their sums.
inline void configure(LinearScratch& scratch, int rows_at_once, int first, int second) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = TILE_HEIGHT;
  for (int tile = 0; tile < 4; tile++)
    config.rows[tile] = static_cast<uint8_t>(rows_at_once == 2 && tile >= 2 ? second : first);
  config.rows[4] = static_cast<uint8_t>(first), config.rows[5] = static_cast<uint8_t>(second);
  if (std::memcmp(&config, &scratch.config, sizeof(config)) == 0) return;
  scratch.config = config;
  configure_tiles(config);
}

// R tiles of rows times P panels; R * P <= 4. w: the first panel, `panel` elements before the next.
template <int R, int P> void multiply_tiles(const bf16* x, const bf16* w, int64_t k, float (&sums)[4][TILE_HEIGHT * PANEL]) {
  const int64_t panel = k * PANEL, second = TILE_HEIGHT * k;
  tile_zero<0>();
  if constexpr (R * P > 1) tile_zero<1>();
  if constexpr (R * P > 2 || R == 2) tile_zero<2>(), tile_zero<3>();
  for (int64_t i = 0; i < k; i += K_MULTIPLE) {
    const bf16* b = w + i * PANEL;
    tile_load<4>(x + i, k * 2);
    if constexpr (R == 2) tile_load<5>(x + second + i, k * 2);
    tile_load<6>(b, 64), tile_dot<0, 4, 6>();
    if constexpr (R == 2) tile_dot<2, 4 + R - 1, 6>();
    if constexpr (P > 1) tile_load<7>(b + panel, 64), tile_dot<1, 4, 7>();
    if constexpr (P > 1 && R == 2) tile_dot<3, 4 + R - 1, 7>();
    if constexpr (P == 4) {
      tile_load<6>(b + 2 * panel, 64), tile_dot<2, 4, 6>();
      tile_load<7>(b + 3 * panel, 64), tile_dot<3, 4, 7>();
    }
  }
  tile_store<0>(sums[0], 64);
  if constexpr (R * P > 1) tile_store<1>(sums[1], 64);
  if constexpr (R * P > 2 || R == 2) tile_store<2>(sums[2], 64), tile_store<3>(sums[3], 64);
}

// Up to 32 rows from `row` on times P panels. x: the rows as bf16, [rows, k].
template <int P>
void amx_block(const Linear<bf16>& op, int64_t row, int rows, int64_t panel, const bf16* x, LinearScratch& scratch) {
  const int first = std::min(rows, TILE_HEIGHT), second = rows - first;
  const bf16* w = op.weight.panel(panel);
  const int64_t k = op.weight.padded_k();
  configure(scratch, second > 0 ? 2 : 1, first, std::max(second, 1));
  if constexpr (P <= 2) {
    if (second > 0) multiply_tiles<2, P>(x, w, k, scratch.sums);
    else multiply_tiles<1, P>(x, w, k, scratch.sums);
  } else {
    multiply_tiles<1, P>(x, w, k, scratch.sums);
  }
  for (int m = 0; m < rows; m++)
    for (int p = 0; p < P; p++) {
      const float* sums = scratch.sums[m < TILE_HEIGHT ? p : 2 + p];
      write(op, row + m, (panel + p) * PANEL, load(sums + m % TILE_HEIGHT * PANEL));
    }
}

inline void linear_by_tiles(const Linear<bf16>& op, Share share, LinearScratch& scratch) {
  const int64_t k = op.weight.padded_k(), step = 2 * TILE_HEIGHT, most = amx_rows(k);
  const int64_t at_once = op.rows <= TILE_HEIGHT ? 4 : 2;
  scratch.config.palette = 0;  // what another layer has set is released
  for (int64_t begin = 0; begin < op.rows; begin += most) {
    const int64_t count = std::min(most, op.rows - begin);
    scratch.rows.take(op, begin, begin + count, k);
    for (int64_t panel = share.begin, panels; panel < share.end; panel += panels) {
      panels = share.end - panel >= at_once ? at_once : 1;
      for (int64_t row = 0; row < count; row += step) {
        const int rows = static_cast<int>(std::min(step, count - row));
        const bf16* x = scratch.rows.data.data() + row * k;
        switch (panels) {
          case 4: amx_block<4>(op, begin + row, rows, panel, x, scratch); break;
          case 2: amx_block<2>(op, begin + row, rows, panel, x, scratch); break;
          default: amx_block<1>(op, begin + row, rows, panel, x, scratch);
        }
      }
    }
  }
  release_tiles();
}

}  // namespace gilir
