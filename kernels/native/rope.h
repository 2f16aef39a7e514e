// Rotary embedding and the write into the KV cache. Reference: kernels/rope.py.
#pragma once
#include "gemm.h"

namespace gilir {

// Rotates one head in place. cos_sin: fp32 [rotary], cosines first.
template <class T, class A> INLINE void rotate(A* head, const float* cos_sin, int64_t rotary) {
  const int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const int count = static_cast<int>(half - i);
    f32x16 first = load_part(head + i, count), second = load_part(head + half + i, count);
    f32x16 cos = load_part(cos_sin + i, count), sin = load_part(cos_sin + half + i, count);
    store_part(head + i, round_to<T>(first * cos - second * sin), count);
    store_part(head + half + i, round_to<T>(second * cos + first * sin), count);
  }
}

template <class T, class A> INLINE void copy_to_cache(const A* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES)
    store_part(to + i, load_part(from + i, static_cast<int>(count - i)), static_cast<int>(count - i));
}

// qkv: [heads + 2 * kv_heads, head_dim] of one token, rotated in place; k_cache, v_cache: its place, or null.
template <class T, class A>
void rope_and_cache_row(A* qkv, int heads, int kv_heads, int head_dim, const float* cos_sin, int rotary, T* k_cache,
                        T* v_cache) {
  for (int head = 0; head < heads + kv_heads; head++) rotate<T>(qkv + head * head_dim, cos_sin, rotary);
  if (k_cache == nullptr) return;
  copy_to_cache<T>(qkv + heads * head_dim, k_cache, kv_heads * head_dim);
  copy_to_cache<T>(qkv + (heads + kv_heads) * head_dim, v_cache, kv_heads * head_dim);
}

}  // namespace gilir
