// Linear layers.
//
// An output is one chain of fused multiply-adds over rising k, whatever the number of rows and threads. In bf16, with
// AVX512-BF16, it is one chain over rising pairs of k, the second of a pair first; with AMX, sums over steps of 32,
// added up over rising k. Threads share the output columns.
#pragma once
#include "gemm_few.h"
#include "gemm_many.h"
#if defined(GILIR_AMX) || defined(GILIR_EMULATE_AMX)
#include "gemm_amx.h"
#elif defined(GILIR_DOT) || defined(GILIR_EMULATE_DOT)
#include "gemm_dot.h"
#endif

namespace gilir {

#if !(defined(GILIR_AMX) || defined(GILIR_EMULATE_AMX) || defined(GILIR_DOT) || defined(GILIR_EMULATE_DOT))
struct LinearScratch { void reserve(int64_t) {} };
#endif

template <class T> void linear(const Linear<T>& op, int thread, int threads, [[maybe_unused]] LinearScratch& scratch) {
  const Share share(op.weight.panels(), thread, threads);
  if (op.rows == 0) return;  // no logits are wanted
#if defined(GILIR_AMX) || defined(GILIR_EMULATE_AMX)
  if constexpr (std::is_same_v<T, bf16>) return linear_by_tiles(op, share, scratch);
#elif defined(GILIR_DOT) || defined(GILIR_EMULATE_DOT)
  if constexpr (std::is_same_v<T, bf16>) return linear_by_dots(op, share, scratch);
#endif
  if (op.rows <= FEW_ROWS) return linear_of_few(op, share);
  linear_of_many(op, share);
}

}  // namespace gilir
