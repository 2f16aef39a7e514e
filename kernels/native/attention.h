// Causal attention over a paged KV cache. Reference: kernels/attention_torch.py.
//
// A query sees its keys in parts of PART, cut at fixed positions. Each part is softmaxed by itself, then the parts are
// joined in rising order (the safe softmax of Milakov & Gimelshein, 2018). So the bits of a query's result hang on its
// own keys alone, and the parts of a long context can be computed by several threads.
#pragma once
#include "attention_part.h"

namespace gilir {

// Of a decode, an item takes several KV heads: their keys lie side by side, and are read from the memory in one go.
// With few rows each takes one, or there would be nothing to share among the threads.
inline std::vector<AttentionItem> attention_items(const int32_t* query_start, int rows, int heads, int kv_heads, int threads) {
  const int group = heads / kv_heads, most = std::max(MAX_QUERIES / group, 1);
  const int together = rows >= 4 * threads ? std::min(most, kv_heads) : 1;
  std::vector<AttentionItem> items;
  for (int row = 0; row < rows; row++) {
    const int length = query_start[row + 1] - query_start[row], side = length == 1 ? together : 1;
    for (int query = 0; query < length; query += most)
      for (int kv_head = 0; kv_head < kv_heads; kv_head += side)
        for (int head = 0; head < group; head += MAX_QUERIES)
          items.push_back({row, query, std::min(most, length - query), kv_head, std::min(side, kv_heads - kv_head), head,
                           std::min(MAX_QUERIES, group - head)});
  }
  return items;
}

// Calls body(row of the item, query of the sequence, head of all) for each row.
template <class T, class F> INLINE void each_row(const Attention<T>& op, const AttentionItem& item, F&& body) {
  const int group = op.heads / op.kv_heads;
  int row = 0;
  for (int kv_head = item.kv_head; kv_head < item.kv_head + item.kv_heads; kv_head++)
    for (int query = item.query; query < item.query + item.queries; query++)
      for (int head = 0; head < item.heads; head++) body(row++, query, kv_head * group + item.head + head);
}

template <class T> void load_queries(const Attention<T>& op, const AttentionItem& item, AttentionScratch& s) {
  s.count = item.rows();
  const int length = op.query_start[item.row + 1] - op.query_start[item.row];
  each_row(op, item, [&](int row, int query, int head) {
    const Activation* q = op.q + (op.query_start[item.row] + query) * op.q_stride + head * op.head_dim;
    for (int i = 0; i < op.head_dim; i += LANES)
      store(s.q + row * s.width + i, load_part(q + i, op.head_dim - i) * set1(op.scale));
    s.limit[row] = op.context_lens[item.row] - length + query + 1;
    s.first[row] = op.window > 0 ? std::max(s.limit[row] - op.window, 0) : 0;
  });
}

// Joins a part to what the parts before it gave. [width] each.
inline void join(float* total, Joined& joined, const float* part, Joined other, int64_t width) {
  if (other.highest == -INF) return;
  const bool first = joined.highest == -INF;
  const float highest = std::max(joined.highest, other.highest);
  const float a = first ? 0.0f : exp(joined.highest - highest), b = exp(other.highest - highest);
  for (int64_t i = 0; i < width; i += LANES) {
    f32x16 x = load(part + i) * set1(b);
    store(total + i, first ? x : fma(load(total + i), set1(a), x));
  }
  joined = {highest, first ? other.sum * b : __builtin_fmaf(joined.sum, a, other.sum * b)};
}

template <class T>
void write_rows(const Attention<T>& op, const AttentionItem& item, const float* total, const Joined* joined, int64_t width) {
  each_row(op, item, [&](int row, int query, int head) {
    Activation* out = op.out + (op.query_start[item.row] + query) * op.out_stride + head * op.head_dim;
    const bool empty = joined[row].highest == -INF;
    for (int i = 0; i < op.head_dim; i += LANES) {
      f32x16 x = empty ? zero() : load(total + row * width + i) / set1(joined[row].sum);
      store_part(out + i, round_to<T>(x), op.head_dim - i);
    }
  });
}

// The parts that some query of the item sees keys of.
struct Parts {
  int first_key, last_key, first, count;  // keys [first_key, last_key); parts [first, first + count)

  template <class T> static Parts of(const Attention<T>& op, const AttentionItem& item) {
    const int length = op.query_start[item.row + 1] - op.query_start[item.row];
    const int limit = op.context_lens[item.row] - length + item.query + 1;
    const int last = std::max(limit + item.queries - 1, 0);
    const int key = op.window > 0 ? std::max(limit - op.window, 0) : 0;
    return {key, last, key / PART, (last + PART - 1) / PART - key / PART};
  }
  Part operator[](int index) const {
    const int begin = (first + index) * PART;
    return {begin, std::max(first_key - begin, 0), std::min(last_key - begin, PART)};
  }
};

// What stands before the first part: nothing, or the head's sink. total: [rows, width].
template <class T>
void begin_rows(const Attention<T>& op, const AttentionItem& item, float* total, Joined* joined, int64_t width) {
  std::fill(joined, joined + MAX_QUERIES, Joined{-INF, 0.0f});
  if (op.sinks == nullptr) return;
  std::fill(total, total + MAX_QUERIES * width, 0.0f);
  each_row(op, item, [&](int row, int, int head) { joined[row] = {to_float(op.sinks[head]), 1.0f}; });
}

// `next`: the item that the thread computes after this one, or null; its first keys are fetched meanwhile.
template <class T>
void attend(const Attention<T>& op, const AttentionItem& item, const AttentionItem* next, AttentionScratch& s) {
  load_queries(op, item, s);
  Joined joined[MAX_QUERIES], other[MAX_QUERIES];
  begin_rows(op, item, s.out, joined, s.width);
  const Parts parts = Parts::of(op, item), next_parts = next == nullptr ? Parts{} : Parts::of(op, *next);
  if (next_parts.count == 0) next = nullptr;
  for (int index = 0; index < parts.count; index++) {
    const bool last = index + 1 == parts.count;
    attend_part(op, item, parts[index], s, s.part, other, last ? next : &item, last ? next_parts[0] : parts[index + 1]);
    for (int row = 0; row < s.count; row++)
      join(s.out + row * s.width, joined[row], s.part + row * s.width, other[row], s.width);
  }
  write_rows(op, item, s.out, joined, s.width);
}

// For few items and long contexts: the parts of an item go to several threads, and are joined when all are there.
struct SplitAttention {
  int64_t width = 0, most_parts = 0;
  std::vector<float> out;      // [items, most_parts, MAX_QUERIES, width]
  std::vector<Joined> joined;  // [items, most_parts, MAX_QUERIES]

  void resize(int64_t items, int64_t parts, int64_t head_dim) {
    width = padded(head_dim, LANES), most_parts = parts;
    out.resize(std::max(out.size(), static_cast<size_t>(items * parts * MAX_QUERIES * width)));
    joined.resize(std::max(joined.size(), static_cast<size_t>(items * parts * MAX_QUERIES)));
  }
  // task: item * most_parts + part.
  template <class T>
  void attend(const Attention<T>& op, const std::vector<AttentionItem>& items, int64_t task, AttentionScratch& s) {
    const AttentionItem& item = items[static_cast<size_t>(task / most_parts)];
    const Parts parts = Parts::of(op, item);
    if (task % most_parts >= parts.count) return;
    load_queries(op, item, s);
    attend_part(op, item, parts[static_cast<int>(task % most_parts)], s, out.data() + task * MAX_QUERIES * width,
                joined.data() + task * MAX_QUERIES);
  }
  template <class T>
  void finish(const Attention<T>& op, const std::vector<AttentionItem>& items, int64_t index, AttentionScratch& s) const {
    const AttentionItem& item = items[static_cast<size_t>(index)];
    Joined total[MAX_QUERIES];
    begin_rows(op, item, s.out, total, width);
    const int count = Parts::of(op, item).count, rows = item.rows();
    for (int part = 0; part < count; part++)
      for (int row = 0; row < rows; row++) {
        const int64_t place = (index * most_parts + part) * MAX_QUERIES + row;
        join(s.out + row * width, total[row], out.data() + place * width, joined[static_cast<size_t>(place)], width);
      }
    write_rows(op, item, s.out, total, width);
  }
};

}  // namespace gilir
