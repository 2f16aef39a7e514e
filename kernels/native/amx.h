// The tile registers of AMX: 16 rows of 64 bytes each. Without GILIR_AMX they are stood for by memory, with the
// arithmetic of the architecture manual (Intel SDM, volume 2, TDPBF16PS), for tests.
#pragma once
#include "vec.h"

namespace gilir {

// Memory layout that LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

#if defined(GILIR_AMX)

INLINE void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
INLINE void release_tiles() { asm volatile("tilerelease"); }
template <int TILE> INLINE void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }
template <int TILE> INLINE void tile_load(const void* p, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(TILE) : "memory");
}
template <int TILE> INLINE void tile_store(void* p, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row_bytes), "i"(TILE) : "memory");
}
template <int SUM, int A, int B> INLINE void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

#else

struct Tiles {
  TileConfig config;
  alignas(64) uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

INLINE void configure_tiles(const TileConfig& config) {
  tiles.config = config;
  std::memset(tiles.data, 0, sizeof(tiles.data));
}
INLINE void release_tiles() { tiles.config = TileConfig{}; }
template <int TILE> INLINE void tile_zero() { std::memset(tiles.data[TILE], 0, sizeof(tiles.data[TILE])); }
template <int TILE> INLINE void tile_load(const void* p, int64_t row_bytes) {
  tile_zero<TILE>();
  for (int row = 0; row < tiles.config.rows[TILE]; row++)
    std::memcpy(tiles.data[TILE][row], static_cast<const char*>(p) + row * row_bytes, tiles.config.row_bytes[TILE]);
}
template <int TILE> INLINE void tile_store(void* p, int64_t row_bytes) {
  for (int row = 0; row < tiles.config.rows[TILE]; row++)
    std::memcpy(static_cast<char*>(p) + row * row_bytes, tiles.data[TILE][row], tiles.config.row_bytes[TILE]);
}
// Subnormal numbers count as zero, before and after.
template <int SUM, int A, int B> inline void tile_dot() {
  const auto pair = [](int tile, int row, int column, int odd) {
    bf16 x;
    std::memcpy(&x, &tiles.data[tile][row][(2 * column + odd) * 2], 2);
    return flushed(to_float(x));
  };
  for (int m = 0; m < tiles.config.rows[A]; m++)
    for (int n = 0; n < tiles.config.row_bytes[SUM] / 4; n++) {
      float parts[2] = {}, sum;
      for (int k = 0; k < tiles.config.row_bytes[A] / 4; k++)
        for (int odd = 0; odd < 2; odd++)
          parts[odd] = flushed(__builtin_fmaf(pair(A, m, k, odd), pair(B, k, n, odd), parts[odd]));
      std::memcpy(&sum, &tiles.data[SUM][m][n * 4], 4);
      sum = flushed(flushed(sum) + flushed(parts[0] + parts[1]));
      std::memcpy(&tiles.data[SUM][m][n * 4], &sum, 4);
    }
}

#endif

}  // namespace gilir
