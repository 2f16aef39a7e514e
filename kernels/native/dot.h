// VDPBF16PS of AVX512-BF16: 16 sums, and to each the products of two bf16 numbers with two others. Without GILIR_DOT
// it is stood for by loops, with the arithmetic of the architecture manual (Intel SDM, volume 2), for tests: two fused
// multiply-adds, the second of a pair first, each rounded to nearest even, subnormal numbers being zero.
#pragma once
#include "vec.h"

namespace gilir {

#if defined(GILIR_DOT)

struct bf16x32 { __m512bh v; };  // 16 pairs

INLINE bf16x32 load_pairs(const bf16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
// One pair, 16 times.
INLINE bf16x32 set1_pair(const bf16* p) {
  int pair;
  std::memcpy(&pair, p, 4);
  return {(__m512bh)_mm512_set1_epi32(pair)};
}
INLINE f32x16 dot(f32x16 sum, bf16x32 a, bf16x32 b) { return {_mm512_dpbf16_ps(sum.v, a.v, b.v)}; }

#else

struct bf16x32 { bf16 v[2 * LANES]; };

INLINE bf16x32 load_pairs(const bf16* p) {
  bf16x32 r;
  std::memcpy(&r, p, sizeof(r));
  return r;
}
INLINE bf16x32 set1_pair(const bf16* p) {
  bf16x32 r;
  for (int i = 0; i < 2 * LANES; i++) r.v[i] = p[i % 2];
  return r;
}
inline f32x16 dot(f32x16 sum, bf16x32 a, bf16x32 b) {
  alignas(64) float sums[LANES];
  store(sums, sum);
  for (int i = 0; i < LANES; i++) {
    sums[i] = flushed(sums[i]);
    for (int place : {2 * i + 1, 2 * i})
      sums[i] = flushed(__builtin_fmaf(flushed(to_float(a.v[place])), flushed(to_float(b.v[place])), sums[i]));
  }
  return load(sums);
}

#endif

}  // namespace gilir
