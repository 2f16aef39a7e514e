// Linear layers whose weights are stored in eight bits. Reference: kernels/quantized_linear.py.
//
// Panels hold 8-bit values, [panel][K][16]; they become fp32 on their way into the products of gemm.h. A column's sum is
// multiplied by the column's scale, the bias is added, and then it is rounded, once.
#pragma once
#include "gemm.h"

namespace gilir {

struct i8 { int8_t value; };
struct e4m3 { uint8_t bits; };  // of the OCP specification (2023): largest 448, no infinity

// A weight stored as a W in a model whose format is T.
template <class W, class T> struct Quantized { W value; };

template <class W, class T> struct Linear<Quantized<W, T>> {
  const Activation* x;  // as in linear.h
  int64_t rows, x_stride;
  Packed<Quantized<W, T>> weight;
  const float* channel_scale;  // [N]
  const T* bias;
  Join join;
  float scale;
  float* out;
  int64_t out_stride;
};

// Moved to where fp16 has its exponent and mantissa, the bits of an e4m3 mean 2^-8 of its value, subnormal or not.
constexpr float E4M3_UNIT = 256.0f;

#if defined(GILIR_EMULATE)
INLINE f32x16 widen(const i8* p) { f32x16 r; for (int i = 0; i < LANES; i++) r.v[i] = p[i].value; return r; }
INLINE f32x16 widen(const e4m3* p) {
  alignas(32) f16 half[LANES];
  for (int i = 0; i < LANES; i++)
    half[i].bits = static_cast<uint16_t>((p[i].bits & 0x80) << 8 | (p[i].bits & 0x7f) << 7);
  return load(half);
}
#else
INLINE __m128i load_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
#if defined(__AVX512F__)
INLINE f32x16 widen(const i8* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(p)))}; }
#else
INLINE __m256 widen_half(const i8* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
INLINE f32x16 widen(const i8* p) { return {{widen_half(p), widen_half(p + 8)}}; }
#endif
INLINE f32x16 widen(const e4m3* p) {
  __m256i wide = _mm256_cvtepi8_epi16(load_bytes(p));  // the sign goes all the way up
  __m256i half = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80)),
                                 _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0x8000))));
#if defined(__AVX512F__)
  return {_mm512_cvtph_ps(half)};
#else
  return {{_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))}};
#endif
}
#endif

// Of an e4m3, 1 / E4M3_UNIT of it: the sum is scaled anyway.
template <class W, class T> INLINE f32x16 load(const Quantized<W, T>* p) { return widen(&p->value); }
constexpr float unit(i8) { return 1.0f; }
constexpr float unit(e4m3) { return E4M3_UNIT; }

template <class W, class T>
INLINE void write(const Linear<Quantized<W, T>>& op, int64_t row, int64_t column, f32x16 x) {
  const int count = static_cast<int>(op.weight.n - column);
  finish<T>(op, row, column, x * (load_part(op.channel_scale + column, count) * set1(unit(W{}))));
}

}  // namespace gilir
