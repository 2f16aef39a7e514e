// Whether a program and its batch stay inside its tensors. A caller's mistake must not become a read of somebody else's memory.
#pragma once
#include "program.h"

namespace gilir {

inline bool within(const int64_t* values, int64_t count, int64_t begin, int64_t end) {
  for (int64_t i = 0; i < count; i++)
    if (values[i] < begin || values[i] >= end) return false;
  return true;
}

// What an operation looks up by the batch's numbers: rows of a table, of the cache, of a buffer.
inline bool is_sound(const Op& op, const Batch& batch) {
  const int64_t count = op.taken ? batch.taken : batch.tokens;
  switch (op.kind) {
    case Kind::EMBED: return within(batch.token_ids, count, 0, op.n);
    case Kind::TAKE_ROWS: return within(batch.logit_rows, count, 0, batch.tokens);
    case Kind::ROPE_AND_CACHE:
      return within(batch.positions, count, 0, op.n) && within(batch.slots, count, -1, batch.num_blocks * batch.block_size);
    default: return true;
  }
}

// Query tokens of each row one behind the other, each context within its table, each block used there within the cache.
inline bool is_sound(const Batch& batch) {
  if (batch.rows == 0) return true;
  if (batch.query_start[0] != 0 || batch.query_start[batch.rows] > batch.tokens) return false;
  for (int64_t row = 0; row < batch.rows; row++) {
    const int64_t queries = batch.query_start[row + 1] - batch.query_start[row], context = batch.context_lens[row];
    if (queries < 0 || context < 0 || (context > 0 && queries > context)) return false;
    const int64_t blocks = (context + batch.block_size - 1) / batch.block_size;
    if (blocks > batch.table_stride) return false;
    const int32_t* table = batch.block_tables + row * batch.table_stride;
    for (int64_t i = 0; i < blocks; i++)
      if (table[i] < 0 || table[i] >= batch.num_blocks) return false;
  }
  return true;
}

}  // namespace gilir
