// Sixteen fp32 lanes, the one vector type of all kernels, and the number formats that they are stored in.
//
// Every instruction set gives the same bits: lanes are independent, `fma` rounds once, sums over lanes have one order.
// AVX-512 holds the lanes in one register, AVX2 in two; GILIR_EMULATE does without either, for tests.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if !defined(GILIR_EMULATE)
#include <immintrin.h>
#endif

#if defined(GILIR_EMULATE)
#define UNROLL  // it would cost the compiler more time than it saves
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace gilir {

constexpr int LANES = 16;
constexpr float INF = std::numeric_limits<float>::infinity();

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

INLINE float bits_to_float(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }
INLINE uint32_t float_to_bits(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }

// Round to nearest, ties to even; a NaN stays one.
INLINE void from_float(float x, float* p) { *p = x; }
INLINE void from_float(float x, bf16* p) {
  uint32_t u = float_to_bits(x);
  p->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// As instructions for bf16 take numbers and give them: zero for a subnormal one.
inline float flushed(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

#if defined(__AVX512F__) && !defined(GILIR_EMULATE)

struct f32x16 { __m512 v; };
constexpr int REGISTERS = 32;  // vector registers of the machine

INLINE f32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE f32x16 load(const bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
INLINE f32x16 load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
INLINE void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x.v); }
INLINE void store(bf16* p, f32x16 x) {
  __m512i u = _mm512_castps_si512(x.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  u = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff)), 16);
  u = _mm512_mask_mov_epi32(u, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(u));
}
INLINE f32x16 round_to_bf16(f32x16 x) {
  __m512i u = _mm512_castps_si512(x.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  u = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff));
  u = _mm512_and_si512(u, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  u = _mm512_mask_mov_epi32(u, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  return {_mm512_castsi512_ps(u)};
}
INLINE void store(f16* p, f32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
// Of 16 pairs, the first of each, or the second.
INLINE f32x16 load_pair(const bf16* p, int odd) {
  __m512i u = _mm512_loadu_si512(p);
  u = odd ? _mm512_and_si512(u, _mm512_set1_epi32(static_cast<int>(0xffff0000))) : _mm512_slli_epi32(u, 16);
  return {_mm512_castsi512_ps(u)};
}
INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE f32x16 round_even(f32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
// 2^n for whole n in [-126, 127].
INLINE f32x16 power_of_two(f32x16 n) {
  __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
// value where x < bound, else other.
INLINE f32x16 where_less(f32x16 x, float bound, float value, f32x16 other) {
  return {_mm512_mask_mov_ps(other.v, _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_LT_OQ), _mm512_set1_ps(value))};
}
INLINE __m256 add_halves(f32x16 x) {
  __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1));
  return _mm256_add_ps(_mm512_castps512_ps256(x.v), high);
}

#elif !defined(GILIR_EMULATE)

struct f32x16 { __m256 v[2]; };
constexpr int REGISTERS = 16;

#define BOTH(expression) f32x16 r; { constexpr int i = 0; r.v[i] = expression; } { constexpr int i = 1; r.v[i] = expression; } return r
INLINE f32x16 set1(float x) { BOTH(_mm256_set1_ps(x)); }
INLINE f32x16 load(const float* p) { BOTH(_mm256_loadu_ps(p + 8 * i)); }
INLINE f32x16 load(const bf16* p) {
  BOTH(_mm256_castsi256_ps(_mm256_slli_epi32(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i))), 16)));
}
INLINE f32x16 load(const f16* p) { BOTH(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i)))); }
INLINE void store(float* p, f32x16 x) { _mm256_storeu_ps(p, x.v[0]); _mm256_storeu_ps(p + 8, x.v[1]); }
INLINE __m256i bf16_bits(__m256 x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  u = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, odd), _mm256_set1_epi32(0x7fff)), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(u, _mm256_set1_epi32(0x7fc0), nan);
}
INLINE void store(bf16* p, f32x16 x) {
  __m256i packed = _mm256_packus_epi32(bf16_bits(x.v[0]), bf16_bits(x.v[1]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
INLINE __m256 round_to_bf16(__m256 x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  u = _mm256_add_epi32(_mm256_add_epi32(u, odd), _mm256_set1_epi32(0x7fff));
  u = _mm256_and_si256(u, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
  return _mm256_blendv_ps(_mm256_castsi256_ps(u), _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)),
                          _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
INLINE f32x16 round_to_bf16(f32x16 x) { BOTH(round_to_bf16(x.v[i])); }
INLINE void store(f16* p, f32x16 x) {
  UNROLL for (int i = 0; i < 2; i++)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8 * i), _mm256_cvtps_ph(x.v[i], _MM_FROUND_TO_NEAREST_INT));
}
INLINE __m256 half_of_pairs(const bf16* p, int odd) {
  __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  u = odd ? _mm256_and_si256(u, _mm256_set1_epi32(static_cast<int>(0xffff0000))) : _mm256_slli_epi32(u, 16);
  return _mm256_castsi256_ps(u);
}
INLINE f32x16 load_pair(const bf16* p, int odd) { return {{half_of_pairs(p, odd), half_of_pairs(p + 16, odd)}}; }
INLINE f32x16 operator+(f32x16 a, f32x16 b) { BOTH(_mm256_add_ps(a.v[i], b.v[i])); }
INLINE f32x16 operator-(f32x16 a, f32x16 b) { BOTH(_mm256_sub_ps(a.v[i], b.v[i])); }
INLINE f32x16 operator*(f32x16 a, f32x16 b) { BOTH(_mm256_mul_ps(a.v[i], b.v[i])); }
INLINE f32x16 operator/(f32x16 a, f32x16 b) { BOTH(_mm256_div_ps(a.v[i], b.v[i])); }
INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { BOTH(_mm256_fmadd_ps(a.v[i], b.v[i], c.v[i])); }
INLINE f32x16 max(f32x16 a, f32x16 b) { BOTH(_mm256_max_ps(a.v[i], b.v[i])); }
INLINE f32x16 round_even(f32x16 a) { BOTH(_mm256_round_ps(a.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
// 2^n for whole n in [-126, 127].
INLINE f32x16 power_of_two(f32x16 n) {
  BOTH(_mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v[i]), _mm256_set1_epi32(127)), 23)));
}
// value where x < bound, else other.
INLINE f32x16 where_less(f32x16 x, float bound, float value, f32x16 other) {
  BOTH(_mm256_blendv_ps(other.v[i], _mm256_set1_ps(value), _mm256_cmp_ps(x.v[i], _mm256_set1_ps(bound), _CMP_LT_OQ)));
}
#undef BOTH
INLINE __m256 add_halves(f32x16 x) { return _mm256_add_ps(x.v[0], x.v[1]); }

#else  // GILIR_EMULATE

struct f32x16 { float v[16]; };
constexpr int REGISTERS = GILIR_EMULATE;  // those of the machine that is stood for

#define LANEWISE(expression) f32x16 r; for (int i = 0; i < LANES; i++) r.v[i] = expression; return r
INLINE float half_to_float(uint16_t h) { _Float16 x; std::memcpy(&x, &h, 2); return static_cast<float>(x); }
INLINE f32x16 set1(float x) { LANEWISE(x); }
INLINE f32x16 load(const float* p) { LANEWISE(p[i]); }
INLINE f32x16 load(const bf16* p) { LANEWISE(to_float(p[i])); }
INLINE f32x16 load(const f16* p) { LANEWISE(half_to_float(p[i].bits)); }
INLINE void store(float* p, f32x16 x) { for (int i = 0; i < LANES; i++) p[i] = x.v[i]; }
INLINE void store(bf16* p, f32x16 x) { for (int i = 0; i < LANES; i++) from_float(x.v[i], p + i); }
INLINE f32x16 round_to_bf16(f32x16 x) {
  f32x16 r;
  for (int i = 0; i < LANES; i++) { bf16 v; from_float(x.v[i], &v); r.v[i] = to_float(v); }
  return r;
}
INLINE void store(f16* p, f32x16 x) {
  for (int i = 0; i < LANES; i++) { _Float16 h = static_cast<_Float16>(x.v[i]); std::memcpy(p + i, &h, 2); }
}
INLINE f32x16 load_pair(const bf16* p, int odd) { LANEWISE(to_float(p[2 * i + odd])); }
INLINE f32x16 operator+(f32x16 a, f32x16 b) { LANEWISE(a.v[i] + b.v[i]); }
INLINE f32x16 operator-(f32x16 a, f32x16 b) { LANEWISE(a.v[i] - b.v[i]); }
INLINE f32x16 operator*(f32x16 a, f32x16 b) { LANEWISE(a.v[i] * b.v[i]); }
INLINE f32x16 operator/(f32x16 a, f32x16 b) { LANEWISE(a.v[i] / b.v[i]); }
INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { LANEWISE(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
INLINE f32x16 max(f32x16 a, f32x16 b) { LANEWISE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
INLINE f32x16 round_even(f32x16 a) { LANEWISE(__builtin_rintf(a.v[i])); }
INLINE f32x16 power_of_two(f32x16 n) {
  LANEWISE(n.v[i] == n.v[i] ? bits_to_float(static_cast<uint32_t>(static_cast<int>(n.v[i]) + 127) << 23) : n.v[i]);
}
INLINE f32x16 where_less(f32x16 x, float bound, float value, f32x16 other) {
  LANEWISE(x.v[i] < bound ? value : other.v[i]);
}

#endif

INLINE f32x16 zero() { return set1(0.0f); }

// out[j] = the sum of the lanes of x[j]; of eight vectors at once, always in the same order.
INLINE void sum_lanes(const f32x16 (&x)[8], float* out) {
#if defined(GILIR_EMULATE)
  for (int j = 0; j < 8; j++) {
    float h[8];
    for (int i = 0; i < 8; i++) h[i] = x[j].v[i] + x[j].v[i + 8];
    out[j] = ((h[0] + h[2]) + (h[1] + h[3])) + ((h[4] + h[6]) + (h[5] + h[7]));
  }
#else
  __m256 h[8], pair[4], quad[2];
  UNROLL for (int j = 0; j < 8; j++) h[j] = add_halves(x[j]);
  UNROLL for (int j = 0; j < 4; j++)
    pair[j] = _mm256_add_ps(_mm256_unpacklo_ps(h[2 * j], h[2 * j + 1]), _mm256_unpackhi_ps(h[2 * j], h[2 * j + 1]));
  UNROLL for (int j = 0; j < 2; j++)
    quad[j] = _mm256_add_ps(_mm256_shuffle_ps(pair[2 * j], pair[2 * j + 1], 0x44),
                            _mm256_shuffle_ps(pair[2 * j], pair[2 * j + 1], 0xee));
  _mm256_storeu_ps(out, _mm256_add_ps(_mm256_permute2f128_ps(quad[0], quad[1], 0x20),
                                      _mm256_permute2f128_ps(quad[0], quad[1], 0x31)));
#endif
}

INLINE float sum_lanes(f32x16 x) {
  alignas(64) float v[16];
  store(v, x);
  float h[8];
  for (int i = 0; i < 8; i++) h[i] = v[i] + v[i + 8];
  return ((h[0] + h[2]) + (h[1] + h[3])) + ((h[4] + h[6]) + (h[5] + h[7]));
}

INLINE float to_float(f16 x) {
  alignas(32) f16 v[16] = {x};
  alignas(64) float w[16];
  store(w, load(v));
  return w[0];
}
INLINE void from_float(float x, f16* p) {
  alignas(32) f16 v[16];
  store(v, set1(x));
  *p = v[0];
}

// What x becomes when it is stored as a T.
template <class T> INLINE f32x16 round_to(f32x16 x) {
  alignas(32) T v[16];
  store(v, x);
  return load(v);
}
template <> INLINE f32x16 round_to<float>(f32x16 x) { return x; }
template <> INLINE f32x16 round_to<bf16>(f32x16 x) { return round_to_bf16(x); }
template <class T> INLINE float round_to(float x) {
  T v;
  from_float(x, &v);
  return to_float(v);
}

// e^x within 2 units in the last place: 2^n e^r with |r| <= ln(2) / 2; 0 below -87.3, infinity above 88.7.
INLINE f32x16 exp(f32x16 x) {
  f32x16 bounded = where_less(x, -87.3f, -87.3f, x);
  bounded = where_less(zero() - x, -88.8f, 88.8f, bounded);
  f32x16 n = round_even(bounded * set1(1.44269504f));
  f32x16 r = fma(n, set1(-0.693359375f), bounded);
  r = fma(n, set1(2.12194440e-4f), r);
  f32x16 p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  f32x16 half = round_even(n * set1(0.5f));  // 2^128 is no number, but the product may be one
  p = p * power_of_two(half) * power_of_two(n - half);
  p = where_less(x, -87.3f, 0.0f, p);
  return where_less(zero() - x, -88.7228f, INF, p);
}

INLINE float exp(float x) {
  alignas(64) float v[16];
  store(v, exp(set1(x)));
  return v[0];
}

INLINE f32x16 tanh(f32x16 x) { return set1(1.0f) - set1(2.0f) / (exp(x + x) + set1(1.0f)); }

// The first `count` of 16 lanes; the others 0, and not read.
template <class T> INLINE f32x16 load_part(const T* p, int count) {
  if (count >= LANES) return load(p);
  alignas(64) T v[16];
  std::memset(static_cast<void*>(v), 0, sizeof(v));
  std::memcpy(static_cast<void*>(v), p, sizeof(T) * static_cast<size_t>(count));
  return load(v);
}
template <class T> INLINE void store_part(T* p, f32x16 x, int count) {
  if (count >= LANES) return store(p, x);
  alignas(64) T v[16];
  store(v, x);
  std::memcpy(static_cast<void*>(p), v, sizeof(T) * static_cast<size_t>(count));
}

}  // namespace gilir
