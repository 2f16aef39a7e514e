// Linear layers.
//
// An output is one chain of fused multiply-adds over rising k, whatever the number of rows and threads. Threads share
// the output columns.
#pragma once
#include "gemm_few.h"
#include "gemm_many.h"

namespace gilir {

template <class T> void linear(const Linear<T>& op, int thread, int threads) {
  const Share share(op.weight.panels(), thread, threads);
  if (op.rows == 0) return;  // no logits are wanted
  if (op.rows <= FEW_ROWS) return linear_of_few(op, share);
  linear_of_many(op, share);
}

}  // namespace gilir
