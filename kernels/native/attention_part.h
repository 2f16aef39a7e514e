// The queries of one item over one part of their keys: scores, softmax, weighted values.
//
// Keys and values of a decode are read once and come from the memory, so they are fetched ahead: a part's values while
// its scores are computed, the keys of the part that comes next while the values are weighed.
#pragma once
#include <algorithm>
#include <vector>

#include "gemm.h"

namespace gilir {

constexpr int PART = 256;
constexpr int MAX_QUERIES = 16;  // rows of one item: (query, head) pairs
constexpr int KEYS = 8;          // keys whose scores are summed up over the lanes together
constexpr int ROWS_AT_ONCE = 3;

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

// A run of queries of one sequence, and of heads: `heads` of each of some neighbouring KV heads, from `head` of it on.
struct AttentionItem {
  int row, query, queries, kv_head, kv_heads, head, heads;
  int rows_of_kv_head() const { return queries * heads; }
  int rows() const { return kv_heads * rows_of_kv_head(); }
};

// A part's keys: it begins at position `begin`; keys from `first` up to `count` of it are read.
struct Part {
  int begin, first, count;
  int keys() const { return count - first; }
};

// Result of a part, or of several joined: weights are relative to exp(highest).
struct Joined { float highest, sum; };

// An item's queries in fp32, and room for the scores of a part; a thread keeps one.
class AttentionScratch {
 public:
  explicit AttentionScratch(int head_dim)
      : width(padded(head_dim, LANES)),
        memory_(static_cast<size_t>(3 * MAX_QUERIES * width + MAX_QUERIES * PART + KEYS + 16)) {
    q = reinterpret_cast<float*>(padded(reinterpret_cast<int64_t>(memory_.data()), 64));
    out = q + MAX_QUERIES * width;
    part = out + MAX_QUERIES * width;
    scores = part + MAX_QUERIES * width;
  }
  const int64_t width;
  float *q, *out, *part;  // [MAX_QUERIES, width]
  // [MAX_QUERIES, PART], and a few more: scores are written KEYS at a time. Those that a row's last block writes past
  // PART are of the next row's keys before `Part::first`, which nobody sees.
  float* scores;
  int count = 0;          // rows
  int first[MAX_QUERIES];  // position of the first key that a row sees
  int limit[MAX_QUERIES];  // of the first that it does not see any more
  int64_t *slots = slots_[0], *next_slots = slots_[1];  // of a part's keys, and of those of the part that comes next
  bool found = false;                                   // whether `slots` is filled already

 private:
  std::vector<float> memory_;
  int64_t slots_[2][PART];
};

// slots[key] of a part: the place of the first of the item's heads in the cache.
template <class T> void find_keys(const Attention<T>& op, const AttentionItem& item, Part part, int64_t* slots) {
  const int32_t* table = op.block_tables + item.row * op.table_stride;
  const int64_t token = static_cast<int64_t>(op.kv_heads) * op.head_dim;
  const int from = part.begin + part.first;
  for (int i = part.first, block = from / op.block_size, offset = from % op.block_size; i < part.count; i++) {
    slots[i] = (static_cast<int64_t>(table[block]) * op.block_size + offset) * token + item.kv_head * op.head_dim;
    if (++offset == op.block_size) offset = 0, block++;
  }
}

// Keys or values of a part on their way into the cache, some lines at each of a number of steps: all at once would
// stop the computation until the memory has answered.
class Fetch {
 public:
  Fetch() = default;
  template <class T>
  Fetch(const T* cache, const int64_t* slots, Part part, int64_t heads_width, int steps)
      : cache_(reinterpret_cast<const char*>(cache)), slots_(slots), key_(part.first), end_(part.count),
        size_(sizeof(T)), bytes_(heads_width * size_) {
    const int64_t lines = part.keys() * ((bytes_ + 63) / 64);
    at_once_ = static_cast<int>((lines + steps - 1) / std::max(steps, 1));
  }
  INLINE void step() {
    for (int i = 0; i < at_once_ && key_ < end_; i++) {
      __builtin_prefetch(cache_ + slots_[key_] * size_ + line_, 0, 2);
      if ((line_ += 64) >= bytes_) line_ = 0, key_++;
    }
  }

 private:
  const char* cache_ = nullptr;
  const int64_t* slots_ = nullptr;
  int key_ = 0, end_ = 0, at_once_ = 0;
  int64_t size_ = 0, bytes_ = 0, line_ = 0;
};

// Calls body(first row, rows) for runs of up to ROWS_AT_ONCE rows. Four are two times two.
template <class F> INLINE void in_blocks(int row, int rows, F&& body) {
  while (rows > 0) {
    const int here = rows == 4 ? 2 : std::min(rows, ROWS_AT_ONCE);
    body(row, here);
    row += here, rows -= here;
  }
}
inline int blocks_of(int rows) { return (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE; }

// out[row, key]: scores of M rows of q with KEYS keys.
template <class T, int M>
__attribute__((noinline)) void score_block(const T* const (&keys)[KEYS], const float* q, int64_t width, int head_dim,
                                           float* out) {
  constexpr int N = M * 4 <= SUMS ? 4 : 2;  // keys at a time
  f32x16 scores[M][KEYS];
  for (int key = 0; key < KEYS; key += N) {
    f32x16 sum[M][N];
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < N; n++) sum[m][n] = zero();
    const auto add = [&](int d, auto&& take) INLINE_LAMBDA {
      UNROLL for (int n = 0; n < N; n++) {
        f32x16 k = take(keys[key + n] + d);
        UNROLL for (int m = 0; m < M; m++) sum[m][n] = fma(load(q + m * width + d), k, sum[m][n]);
      }
    };
    int d = 0;
    for (; d + LANES <= head_dim; d += LANES) add(d, [](const T* k) INLINE_LAMBDA { return load(k); });
    if (d < head_dim) add(d, [&](const T* k) INLINE_LAMBDA { return load_part(k, head_dim - d); });
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < N; n++) scores[m][key + n] = sum[m][n];
  }
  UNROLL for (int m = 0; m < M; m++) sum_lanes(scores[m], out + m * PART);
}

// scores[row, key] of a part.
template <class T>
void score_keys(const Attention<T>& op, const AttentionItem& item, Part part, AttentionScratch& s) {
  const int rows = item.rows_of_kv_head(), steps = (part.keys() + KEYS - 1) / KEYS * item.kv_heads * blocks_of(rows);
  Fetch values(op.v_cache, s.slots, part, item.kv_heads * op.head_dim, steps);
  for (int key = part.first; key < part.count; key += KEYS)
    for (int kv = 0; kv < item.kv_heads; kv++) {
      const T* keys[KEYS];  // those beyond the part stand for its last: nobody reads their scores
      for (int j = 0; j < KEYS; j++)
        keys[j] = op.k_cache + s.slots[std::min(key + j, part.count - 1)] + kv * op.head_dim;
      in_blocks(kv * rows, rows, [&](int row, int here) {
        const float* q = s.q + row * s.width;
        float* out = s.scores + row * PART + key;
        switch (here) {
          case 1: score_block<T, 1>(keys, q, s.width, op.head_dim, out); break;
          case 2: score_block<T, 2>(keys, q, s.width, op.head_dim, out); break;
          default: score_block<T, ROWS_AT_ONCE>(keys, q, s.width, op.head_dim, out);
        }
        values.step();
      });
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
void weigh_values(const T* v_cache, const AttentionScratch& s, int row, Part part, int d, int head_dim, float* out,
                  Fetch& ahead) {
  f32x16 sum[M][C];
  UNROLL for (int m = 0; m < M; m++) UNROLL for (int c = 0; c < C; c++) sum[m][c] = zero();
  const float* weights = s.scores + row * PART;
  const bool whole = d + C * LANES <= head_dim;
  for (int key = part.first; key < part.count; key++) {
    const T* v = v_cache + s.slots[key] + d;
    if (key % KEYS == 0) ahead.step();
    UNROLL for (int c = 0; c < C; c++) {  // one value at a time: there are no registers to keep two in
      f32x16 value = whole ? load(v + c * LANES) : load_part(v + c * LANES, head_dim - d);
      UNROLL for (int m = 0; m < M; m++) sum[m][c] = fma(set1(weights[m * PART + key]), value, sum[m][c]);
    }
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int c = 0; c < C; c++) store(out + (row + m) * s.width + d + c * LANES, sum[m][c]);
}

template <class T, int M>
void weigh_rows(const T* v, const AttentionScratch& s, int row, Part part, int head_dim, float* out, Fetch& ahead) {
  constexpr int C = M * 2 <= SUMS ? 2 : 1;
  int d = 0;
  for (; d + C * LANES <= head_dim; d += C * LANES) weigh_values<T, M, C>(v, s, row, part, d, head_dim, out, ahead);
  for (; d < head_dim; d += LANES) weigh_values<T, M, 1>(v, s, row, part, d, head_dim, out, ahead);
}

// out[row] of all rows; meanwhile the keys of `next` are fetched.
template <class T>
void weigh(const Attention<T>& op, const AttentionItem& item, Part part, const AttentionScratch& s, float* out,
           const AttentionItem* next, Part next_part) {
  const int rows = item.rows_of_kv_head();
  Fetch ahead;
  if (next != nullptr) {
    const int passes = item.kv_heads * blocks_of(rows) * std::max(op.head_dim / (2 * LANES), 1);
    ahead = Fetch(op.k_cache, s.next_slots, next_part, next->kv_heads * op.head_dim, (part.keys() + KEYS - 1) / KEYS * passes);
  }
  for (int kv = 0; kv < item.kv_heads; kv++) {
    const T* v = op.v_cache + kv * op.head_dim;
    in_blocks(kv * rows, rows, [&](int row, int here) {
      switch (here) {
        case 1: weigh_rows<T, 1>(v, s, row, part, op.head_dim, out, ahead); break;
        case 2: weigh_rows<T, 2>(v, s, row, part, op.head_dim, out, ahead); break;
        default: weigh_rows<T, ROWS_AT_ONCE>(v, s, row, part, op.head_dim, out, ahead);
      }
    });
  }
}

// The item's queries over one part. out: [rows, width], and one `Joined` a row. `next`: the item whose part is read
// after this one, or null.
template <class T>
void attend_part(const Attention<T>& op, const AttentionItem& item, Part part, AttentionScratch& s, float* out,
                 Joined* joined, const AttentionItem* next = nullptr, Part next_part = {}) {
  if (!s.found) find_keys(op, item, part, s.slots);
  score_keys(op, item, part, s);
  for (int row = 0; row < s.count; row++)
    joined[row] = softmax_row(s.scores + row * PART, part.count, s.first[row] - part.begin, s.limit[row] - part.begin,
                              op.softcap);
  if (next != nullptr) find_keys(op, *next, next_part, s.next_slots);
  weigh(op, item, part, s, out, next, next_part);
  s.found = next != nullptr;
  if (s.found) std::swap(s.slots, s.next_slots);
}

}  // namespace gilir
