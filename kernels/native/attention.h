// Causal attention over a paged KV cache. Reference: kernels/attention_torch.py.
//
// A query sees its keys in parts of PART, cut at fixed positions. Each part is softmaxed by itself, then the parts are
// joined in rising order (the safe softmax of Milakov & Gimelshein, 2018). So the bits of a query's result hang on its
// own keys alone, and the parts of a long context can be computed by several threads.
#pragma once
#include <algorithm>
#include <vector>

#include "gemm.h"

namespace gilir {

constexpr int PART = 256;
constexpr int MAX_QUERIES = 16;  // rows of one item: (query, head) pairs that share a KV head
constexpr int KEYS = 8;          // keys whose scores are summed up together
constexpr int KEYS_AHEAD = 32;   // keys that are being fetched: about what the memory's latency lasts

template <class T> struct Attention {
  const Activation* q;  // [T, heads * head_dim]
  int64_t q_stride;
  const T *k_cache, *v_cache;
  Activation* out;
  int64_t out_stride;
  const int32_t *query_start, *context_lens, *block_tables;
  int64_t table_stride;
  int block_size, heads, kv_heads, head_dim, window;
  float scale, softcap;
  const T* sinks;  // [heads], or null: for each head the score of a key without a value
};

// A run of queries of one sequence and of heads of one KV head.
struct AttentionItem { int row, query, queries, kv_head, head, heads; };

// Result of a part, or of several joined: weights are relative to exp(highest).
struct Joined {
  float highest, sum;
};

inline std::vector<AttentionItem> attention_items(const int32_t* query_start, int rows, int heads, int kv_heads) {
  const int group = heads / kv_heads, most = std::max(MAX_QUERIES / group, 1);
  std::vector<AttentionItem> items;
  for (int row = 0; row < rows; row++) {
    const int length = query_start[row + 1] - query_start[row];
    for (int query = 0; query < length; query += most)
      for (int kv_head = 0; kv_head < kv_heads; kv_head++)
        for (int head = 0; head < group; head += MAX_QUERIES)
          items.push_back({row, query, std::min(most, length - query), kv_head, kv_head * group + head,
                           std::min(MAX_QUERIES, group - head)});
  }
  return items;
}

// One item's queries in fp32, and room for the scores of a part; a thread keeps one.
class AttentionScratch {
 public:
  explicit AttentionScratch(int head_dim)
      : width(padded(head_dim, LANES)),
        memory_(static_cast<size_t>((3 * MAX_QUERIES + KEYS) * width + MAX_QUERIES * PART + 16)) {
    float* p = reinterpret_cast<float*>(padded(reinterpret_cast<int64_t>(memory_.data()), 64));
    q = p;
    out = q + MAX_QUERIES * width;
    part = out + MAX_QUERIES * width;
    keys = part + MAX_QUERIES * width;
    scores = keys + KEYS * width;
  }
  const int64_t width;
  float *q, *out, *part;  // [MAX_QUERIES, width]
  float *keys, *scores;   // [KEYS, width], [MAX_QUERIES, PART]
  int count = 0;  // rows
  int first[MAX_QUERIES];  // position of the first key that a row sees
  int limit[MAX_QUERIES];  // of the first that it does not see any more
  int64_t slots[PART];

 private:
  std::vector<float> memory_;
};

template <class T> void load_queries(const Attention<T>& op, const AttentionItem& item, AttentionScratch& s) {
  s.count = 0;
  const int length = op.query_start[item.row + 1] - op.query_start[item.row];
  for (int query = item.query; query < item.query + item.queries; query++)
    for (int head = item.head; head < item.head + item.heads; head++, s.count++) {
      const Activation* q = op.q + (op.query_start[item.row] + query) * op.q_stride + head * op.head_dim;
      for (int i = 0; i < op.head_dim; i += LANES)
        store(s.q + s.count * s.width + i, load_part(q + i, op.head_dim - i) * set1(op.scale));
      s.limit[s.count] = op.context_lens[item.row] - length + query + 1;
      s.first[s.count] = op.window > 0 ? std::max(s.limit[s.count] - op.window, 0) : 0;
    }
}

// Fetches a head of a key or value.
template <int LEVEL, class T> INLINE void fetch_head(const T* head, int head_dim) {
  for (int i = 0; i < head_dim; i += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(head + i, 0, LEVEL);
}

// A part's keys: it begins at position `begin`; keys from `first` up to `count` of it are read.
struct Part { int begin, first, count; };

// scores[row, key] of a part.
template <class T>
void score_keys(const Attention<T>& op, int kv_head, Part part, AttentionScratch& s, const int32_t* table) {
  const int64_t token = static_cast<int64_t>(op.kv_heads) * op.head_dim;
  const int from = part.begin + part.first, count = part.count, width = static_cast<int>(s.width);
  for (int i = part.first, block = from / op.block_size, offset = from % op.block_size; i < count; i++) {
    s.slots[i] = (static_cast<int64_t>(table[block]) * op.block_size + offset) * token + kv_head * op.head_dim;
    if (++offset == op.block_size) offset = 0, block++;
  }
  for (int key = part.first; key < std::min(part.first + KEYS_AHEAD, count); key++)
    fetch_head<3>(op.k_cache + s.slots[key], op.head_dim);
  for (int key = part.first; key < count; key += KEYS) {
    const int here = std::min(KEYS, count - key);
    for (int j = 0; j < here; j++) {
      const T* k = op.k_cache + s.slots[key + j];
      fetch_head<2>(op.v_cache + s.slots[key + j], op.head_dim);
      if (key + KEYS_AHEAD + j < count) fetch_head<3>(op.k_cache + s.slots[key + KEYS_AHEAD + j], op.head_dim);
      for (int d = 0; d < op.head_dim; d += LANES)
        store(s.keys + j * width + d, load_part(k + d, op.head_dim - d));
    }
    for (int j = here; j < KEYS; j++) std::memset(s.keys + j * width, 0, sizeof(float) * static_cast<size_t>(width));
    for (int row = 0; row < s.count; row++) {
      f32x16 sums[KEYS];
      const float* q = s.q + row * width;
      for (int half = 0; half < KEYS; half += 4) {
        f32x16 a[4] = {zero(), zero(), zero(), zero()};
        for (int d = 0; d < width; d += LANES) {
          f32x16 x = load(q + d);
          UNROLL for (int j = 0; j < 4; j++) a[j] = fma(x, load(s.keys + (half + j) * width + d), a[j]);
        }
        UNROLL for (int j = 0; j < 4; j++) sums[half + j] = a[j];
      }
      float found[KEYS];
      sum_lanes(sums, found);
      std::copy(found, found + here, s.scores + row * PART + key);
    }
  }
}

// Turns a row's `count` scores into weights; the row sees keys [first, limit) of the part, all others weigh 0.
inline Joined softmax_row(float* scores, int count, int first, int limit, float softcap) {
  const int wide = static_cast<int>(padded(count, LANES));
  first = std::clamp(first, 0, count), limit = std::clamp(limit, 0, count);
  if (softcap > 0)
    for (int i = 0; i < wide; i += LANES)
      store(scores + i, tanh(load(scores + i) / set1(softcap)) * set1(softcap));
  std::fill(scores, scores + first, -INF);
  std::fill(scores + limit, scores + wide, -INF);
  f32x16 most = set1(-INF);
  for (int i = 0; i < wide; i += LANES) most = max(load(scores + i), most);
  alignas(64) float lanes[LANES];
  store(lanes, most);
  const float highest = *std::max_element(lanes, lanes + LANES);
  if (highest == -INF) {  // nothing to see, or nothing but NaN
    std::fill(scores, scores + wide, first < limit ? NAN : 0.0f);
    return first < limit ? Joined{0.0f, NAN} : Joined{-INF, 0.0f};
  }
  f32x16 sum = zero();
  for (int i = 0; i < wide; i += LANES) {
    f32x16 weight = exp(load(scores + i) - set1(highest));
    store(scores + i, weight);
    sum = sum + weight;
  }
  return {highest, sum_lanes(sum)};
}

// out[row, d ..] = sum over the keys of weight[row, key] * v[key, d ..]; M rows, C columns of 16.
template <class T, int M, int C>
void weigh_values(const T* v_cache, const AttentionScratch& s, int row, Part part, int d, int head_dim, float* out) {
  f32x16 sum[M][C];
  UNROLL for (int m = 0; m < M; m++) UNROLL for (int c = 0; c < C; c++) sum[m][c] = zero();
  const float* weights = s.scores + row * PART;
  const bool whole = d + C * LANES <= head_dim;
  for (int key = part.first; key < part.count; key++) {
    const T* v = v_cache + s.slots[key] + d;
    UNROLL for (int c = 0; c < C; c++) {  // one value at a time: there are no registers to keep two in
      f32x16 value = whole ? load(v + c * LANES) : load_part(v + c * LANES, head_dim - d);
      UNROLL for (int m = 0; m < M; m++) sum[m][c] = fma(set1(weights[m * PART + key]), value, sum[m][c]);
    }
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int c = 0; c < C; c++) store(out + (row + m) * s.width + d + c * LANES, sum[m][c]);
}

template <class T, int M>
void weigh_rows(const T* v, const AttentionScratch& s, int row, Part part, int head_dim, float* out) {
  constexpr int C = M * 2 <= SUMS ? 2 : 1;
  int d = 0;
  for (; d + C * LANES <= head_dim; d += C * LANES) weigh_values<T, M, C>(v, s, row, part, d, head_dim, out);
  for (; d < head_dim; d += LANES) weigh_values<T, M, 1>(v, s, row, part, d, head_dim, out);
}

// The item's queries over one part. out: [rows, width], and one `Joined` a row.
template <class T>
void attend_part(const Attention<T>& op, const AttentionItem& item, Part part, AttentionScratch& s, float* out,
                 Joined* joined) {
  score_keys(op, item.kv_head, part, s, op.block_tables + item.row * op.table_stride);
  for (int row = 0; row < s.count; row++)
    joined[row] = softmax_row(s.scores + row * PART, part.count, s.first[row] - part.begin, s.limit[row] - part.begin,
                              op.softcap);
  for (int row = 0; row < s.count;) {
    const int left = s.count - row, rows = left == 4 ? 2 : std::min(left, 3);
    switch (rows) {
      case 1: weigh_rows<T, 1>(op.v_cache, s, row, part, op.head_dim, out); break;
      case 2: weigh_rows<T, 2>(op.v_cache, s, row, part, op.head_dim, out); break;
      default: weigh_rows<T, 3>(op.v_cache, s, row, part, op.head_dim, out);
    }
    row += rows;
  }
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
  int row = 0;
  for (int query = item.query; query < item.query + item.queries; query++)
    for (int head = item.head; head < item.head + item.heads; head++, row++) {
      Activation* out = op.out + (op.query_start[item.row] + query) * op.out_stride + head * op.head_dim;
      const bool empty = joined[row].highest == -INF;
      for (int i = 0; i < op.head_dim; i += LANES) {
        f32x16 x = empty ? zero() : load(total + row * width + i) / set1(joined[row].sum);
        store_part(out + i, round_to<T>(x), op.head_dim - i);
      }
    }
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
  for (int row = 0; row < item.queries * item.heads; row++)
    joined[row] = {to_float(op.sinks[item.head + row % item.heads]), 1.0f};
}

template <class T> void attend(const Attention<T>& op, const AttentionItem& item, AttentionScratch& s) {
  load_queries(op, item, s);
  Joined joined[MAX_QUERIES], other[MAX_QUERIES];
  begin_rows(op, item, s.out, joined, s.width);
  const Parts parts = Parts::of(op, item);
  for (int index = 0; index < parts.count; index++) {
    attend_part(op, item, parts[index], s, s.part, other);
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
    const int count = Parts::of(op, item).count, rows = item.queries * item.heads;
    for (int part = 0; part < count; part++)
      for (int row = 0; row < rows; row++) {
        const int64_t place = (index * most_parts + part) * MAX_QUERIES + row;
        join(s.out + row * width, total[row], out.data() + place * width, joined[static_cast<size_t>(place)], width);
      }
    write_rows(op, item, s.out, total, width);
  }
};

}  // namespace gilir
