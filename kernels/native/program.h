// A decoder as a list of operations over buffers of rows, and one batch for it. Mirrored in library.py.
#pragma once
#include <cstdint>

namespace gilir {

enum class Kind : int32_t {
  EMBED, NORM, LINEAR, ROPE_AND_CACHE, ATTENTION, GATED, ADD, TAKE_ROWS, SCALE, SOFTCAP, DIVIDE,
  ROUTE, GROUP, EXPAND, EXPERTS, COMBINE
};

constexpr int32_t LOGITS = -1;  // as `out`: the caller's fp32 tensor

struct Op {
  Kind kind;
  int32_t in, out;        // buffers
  int32_t taken;          // 1: works on the rows whose logits are wanted
  int32_t offset, count;  // NORM: `count` blocks of `width` columns from `offset` on
  int32_t layer, window;
  int32_t heads, kv_heads, head_dim, rotary;
  int32_t flag;           // NORM: 1 + weight. LINEAR: add to `out`. GATED: `Activate`. ROUTE: renormalize
  int32_t eight_bits;     // LINEAR: the weight is in GILIR_WEIGHTS, not in the model's format
  int32_t experts;        // ROUTE, EXPERTS: how many there are
  int32_t pairs;          // k > 0: works on k pairs of a row and an expert for each row
  int64_t n, k;           // LINEAR, EMBED: of the packed weight. EXPERTS: of each expert's. NORM: k is the width.
                          // ROPE: n positions of the table
  float scale, softcap, eps;
  const void* weight;     // EXPERTS: one packed weight behind the other. ATTENTION: sinks [heads], or null
  const void* bias;       // EXPERTS: [experts, n]
  const float* table;     // ROPE: fp32 [positions, rotary]. LINEAR in eight bits: scales [n]
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
