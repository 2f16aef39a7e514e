// Weights as the matrix products read them: panels of 16 output columns, one behind the other.
//
// fp32, fp16: [panel][K][16]. bf16: [panel][K / 2][16][2]: each 32 bits hold two neighbours in K, so that a shift and
// a mask make fp32 of them, and the very layout that the dot products of AVX512-BF16 and the tiles of AMX read.
// Columns beyond N and inputs beyond K are 0.
#pragma once
#include "vec.h"

namespace gilir {

constexpr int PANEL = 16;
constexpr int K_MULTIPLE = 32;

INLINE int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

template <class T> struct Packed {
  const T* data;
  int64_t n, k;
  int64_t panels() const { return (n + PANEL - 1) / PANEL; }
  int64_t padded_k() const { return padded(k, K_MULTIPLE); }
  const T* panel(int64_t index) const { return data + index * padded_k() * PANEL; }
};

// Place of (column, k) in its panel.
template <class T> INLINE int64_t place(int64_t k, int64_t column) { return k * PANEL + column; }
template <> INLINE int64_t place<bf16>(int64_t k, int64_t column) { return (k / 2 * PANEL + column) * 2 + k % 2; }

// weight: [n, k] row by row; target: [panels * PANEL * padded_k]. Packs panels begin .. end - 1.
template <class T> void pack(const T* weight, int64_t n, int64_t k, T* target, int64_t begin, int64_t end) {
  const int64_t wide = padded(k, K_MULTIPLE);
  for (int64_t panel = begin; panel < end; panel++) {
    T* out = target + panel * wide * PANEL;
    std::memset(static_cast<void*>(out), 0, sizeof(T) * static_cast<size_t>(wide * PANEL));
    for (int64_t first = 0; first < k; first += K_MULTIPLE)
      for (int64_t column = 0; column < PANEL && panel * PANEL + column < n; column++) {
        const T* row = weight + (panel * PANEL + column) * k;
        for (int64_t i = first; i < k && i < first + K_MULTIPLE; i++) out[place<T>(i, column)] = row[i];
      }
  }
}

// One row of the unpacked weight: an embedding's, where the output layer is tied to it.
template <class T, class A> void unpack_row(const Packed<T>& weight, int64_t row, float scale, A* out) {
  const T* panel = weight.panel(row / PANEL);
  for (int64_t i = 0; i < weight.k; i++) {
    float x = to_float(panel[place<T>(i, row % PANEL)]);
    from_float(scale == 1.0f ? x : round_to<T>(x * scale), out + i);
  }
}

}  // namespace gilir
