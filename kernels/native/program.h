// A decoder as a list of operations over buffers of rows, and one batch for it. Mirrored in library.py.
#pragma once
#include <cstdint>

namespace gilir {

enum class Kind : int32_t { EMBED, NORM, LINEAR, ROPE_AND_CACHE, ATTENTION, GATED, ADD, TAKE_ROWS, SCALE, SOFTCAP, DIVIDE };

constexpr int32_t LOGITS = -1;  // as `out`: the caller's fp32 tensor

struct Op {
  Kind kind;
  int32_t in, out;        // buffers
  int32_t taken;          // 1: works on the rows whose logits are wanted
  int32_t offset, count;  // NORM: `count` blocks of `width` columns from `offset` on
  int32_t layer, window;
  int32_t heads, kv_heads, head_dim, rotary;
  int32_t flag;           // NORM: 1 + weight. LINEAR: add to `out`. GATED: `Activate`
  int32_t reserved;
  int64_t n, k;           // LINEAR, EMBED: of the packed weight. NORM: k is the width
  float scale, softcap, eps, spare;
  const void* weight;
  const void* bias;
  const float* table;     // ROPE: fp32 [positions, rotary]
};

struct Batch {
  int64_t tokens, rows, taken, table_stride, block_size, num_blocks, threads;
  const int64_t *token_ids, *positions, *slots, *logit_rows;
  const int32_t *query_start, *context_lens, *block_tables;
  void* const* k_cache;  // one a layer
  void* const* v_cache;
  float* logits;
};

}  // namespace gilir
