// One forward pass of a decoder in one call: every thread walks the list of operations, with a barrier between two
// that divide the work differently.
//
// Built once for each number format: GILIR_DTYPE is float, bf16 or f16; where weights are stored in eight bits,
// GILIR_WEIGHTS is i8 or e4m3.
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "attention.h"
#include "checks.h"
#include "experts.h"
#include "gated_activation.h"
#include "program.h"
#include "quantized.h"
#include "rms_norm.h"
#include "rope.h"

namespace gilir {

using T = GILIR_DTYPE;
using A = Activation;

// Rows of activations, `each` for a row of the batch. The columns up to the stride are 0 and stay so: matrix products read them.
struct Buffer {
  int64_t width = 0, stride = 0, each = 1, capacity = 0;
  A* data = nullptr;
  ~Buffer() { std::free(data); }
  A* row(int64_t index) const { return data + index * stride; }
  void reserve(int64_t rows) {
    rows *= each;
    if (rows <= capacity || stride == 0) return;
    std::free(data);
    data = nullptr;
    capacity = 0;
    const size_t bytes = sizeof(A) * static_cast<size_t>(rows * stride);
    data = static_cast<A*>(std::aligned_alloc(64, static_cast<size_t>(padded(static_cast<int64_t>(bytes), 64))));
    if (data == nullptr) throw std::bad_alloc();
    std::memset(static_cast<void*>(data), 0, bytes);
    capacity = rows;
  }
};

class Decoder {
 public:
  Decoder(const Op* ops, int64_t count, const int64_t* widths, int64_t buffers) : ops_(ops, ops + count), buffers_(buffers) {
    for (size_t i = 0; i < buffers_.size(); i++) {
      buffers_[i].width = widths[i];
      buffers_[i].stride = row_stride(widths[i]);
    }
    for (const Op& op : ops_)
      if (op.pairs > 0) buffers_[static_cast<size_t>(op.out)].each = op.pairs;
  }

  bool accepts(const Batch& batch) const {
    return is_sound(batch) && std::all_of(ops_.begin(), ops_.end(), [&](const Op& op) { return is_sound(op, batch); });
  }

  void run(const Batch& batch) {
    const int64_t most_rows = std::max(batch.tokens, batch.taken);
    for (auto& buffer : buffers_) buffer.reserve(most_rows);
    for (const Op& op : ops_)
      if (op.kind == Kind::ROUTE) routes_.reserve(most_rows, op.experts, op.count);
    reserve_linear_scratch(static_cast<size_t>(batch.threads));
    prepare_attention(batch);
    Pool& pool = Pool::instance();
    const int threads = static_cast<int>(batch.threads);
    pool.run(threads, [&](int thread) {
      for (size_t i = 0; i < ops_.size(); i++) {
        run_op(ops_[i], batch, thread, threads, pool);
        if (i + 1 < ops_.size() && !shares_rows(ops_[i], ops_[i + 1])) sync(pool);
      }
    });
  }

 private:
  static bool by_rows(const Op& op) {
    return op.kind != Kind::LINEAR && op.kind != Kind::ATTENTION && op.kind != Kind::GROUP && op.kind != Kind::EXPERTS;
  }
  // Whether each thread goes on with the rows that it has just made.
  static bool shares_rows(const Op& op, const Op& next) {
    return by_rows(op) && by_rows(next) && op.taken == next.taken && op.pairs == next.pairs && next.kind != Kind::TAKE_ROWS;
  }

  void sync(Pool& pool) {
    pool.barrier.wait([this] { next_task_.store(0, std::memory_order_relaxed); });
  }

  void prepare_attention(const Batch& batch) {
    items_.clear();
    next_task_.store(0);
    for (const Op& op : ops_) {
      if (op.kind != Kind::ATTENTION) continue;
      reserve_attention_scratch(static_cast<size_t>(batch.threads), op.head_dim);
      items_ = attention_items(batch.query_start, static_cast<int>(batch.rows), op.heads, op.kv_heads,
                               static_cast<int>(batch.threads));
      int longest = 0;
      for (int64_t row = 0; row < batch.rows; row++) longest = std::max(longest, batch.context_lens[row]);
      const int64_t count = static_cast<int64_t>(items_.size()), parts = (longest + PART - 1) / PART;
      split_ = batch.threads > 1 && parts > 1 && count < 4 * batch.threads;
      if (split_) split_attention_.resize(count, parts, op.head_dim);
      return;
    }
  }

  // Before the threads begin, as all that follows: none of them may throw.
  void reserve_linear_scratch(size_t threads) {
    while (linear_scratch_.size() < threads) {
      auto scratch = std::make_unique<LinearScratch>();
      for (const Op& op : ops_)
        if (op.kind == Kind::LINEAR || op.kind == Kind::EXPERTS) scratch->reserve(padded(op.k, K_MULTIPLE));
      linear_scratch_.push_back(std::move(scratch));
    }
  }

  void reserve_attention_scratch(size_t threads, int head_dim) {
    while (attention_scratch_.size() < threads)
      attention_scratch_.push_back(std::make_unique<AttentionScratch>(head_dim));
  }

  void run_op(const Op& op, const Batch& batch, int thread, int threads, Pool& pool) {
    if (op.kind == Kind::LINEAR) return run_linear(op, batch, thread, threads);
    if (op.kind == Kind::ATTENTION) return run_attention(op, batch, *attention_scratch_[static_cast<size_t>(thread)], pool);
    const int64_t count = op.taken ? batch.taken : batch.tokens;
    if (op.kind == Kind::EXPERTS) return run_experts(op, thread, threads);
    if (op.kind == Kind::GROUP) return thread == 0 ? routes_.group(count) : void();
    const Share rows(count * std::max(op.pairs, 1), thread, threads);
    for (int64_t row = rows.begin; row < rows.end; row++) run_row(op, batch, row);
  }

  void run_row(const Op& op, const Batch& batch, int64_t row) {
    const T* weight = static_cast<const T*>(op.weight);
    const Buffer& in = buffers_[static_cast<size_t>(op.in)];
    if (op.out == LOGITS) return run_logits_row(op, batch.logits + row * op.n);
    if (op.kind == Kind::ROUTE) return routes_.choose(in.row(row), row, op.flag != 0);
    A* out = buffers_[static_cast<size_t>(op.out)].row(row);
    const A* x = in.row(source_row(op, batch, row));
    switch (op.kind) {
      case Kind::EMBED: return unpack_row(Packed<T>{weight, op.n, op.k}, batch.token_ids[row], op.scale, out);
      case Kind::NORM:
        for (int i = 0; i < op.count; i++) {
          const int64_t at = op.offset + i * op.k;
          rms_norm_row(x + at, weight, op.k, op.eps, op.flag != 0, out + at);
        }
        return;
      case Kind::ROPE_AND_CACHE: return run_rope(op, batch, row, out);
      case Kind::GATED: return gated_row<T>(x, in.width / 2, static_cast<Activate>(op.flag), out);
      case Kind::ADD:
        for (int64_t i = 0; i < in.stride; i += LANES) store(out + i, round_to<T>(load(out + i) + load(x + i)));
        return;
      case Kind::SCALE:
        for (int64_t i = 0; i < in.stride; i += LANES) store(out + i, round_to<T>(load(x + i) * set1(op.scale)));
        return;
      case Kind::COMBINE: return routes_.combine<T>(in.data, in.stride, row, out);
      case Kind::TAKE_ROWS:
      case Kind::EXPAND: std::memcpy(static_cast<void*>(out), x, sizeof(A) * static_cast<size_t>(in.stride)); return;
      default: return;
    }
  }

  int64_t source_row(const Op& op, const Batch& batch, int64_t row) const {
    if (op.kind == Kind::TAKE_ROWS) return batch.logit_rows[row];
    return op.kind == Kind::EXPAND ? routes_.row_of(row) : row;
  }

  static void run_logits_row(const Op& op, float* logits) {
    for (int64_t i = 0; i < op.n; i += LANES) {
      const int count = static_cast<int>(op.n - i);
      f32x16 x = load_part(logits + i, count);
      if (op.kind == Kind::SOFTCAP) x = tanh(x / set1(op.softcap)) * set1(op.softcap);
      if (op.kind == Kind::DIVIDE) x = x / set1(op.scale);
      store_part(logits + i, x, count);
    }
  }

  static void run_rope(const Op& op, const Batch& batch, int64_t row, A* qkv) {
    const int64_t slot = batch.slots[row], width = static_cast<int64_t>(op.kv_heads) * op.head_dim;
    T* k = slot < 0 ? nullptr : static_cast<T*>(batch.k_cache[op.layer]) + slot * width;
    T* v = slot < 0 ? nullptr : static_cast<T*>(batch.v_cache[op.layer]) + slot * width;
    rope_and_cache_row(qkv, op.heads, op.kv_heads, op.head_dim, op.table + batch.positions[row] * op.rotary, op.rotary, k, v);
  }

  void run_linear(const Op& op, const Batch& batch, int thread, int threads) {
    const Buffer& in = buffers_[static_cast<size_t>(op.in)];
    LinearScratch& scratch = *linear_scratch_[static_cast<size_t>(thread)];
    const bool last = op.out == LOGITS;
    const Buffer* out = last ? nullptr : &buffers_[static_cast<size_t>(op.out)];
    const int64_t rows = op.taken ? batch.taken : batch.tokens, out_stride = last ? op.n : out->stride;
    const T* bias = static_cast<const T*>(op.bias);
    const Join join = op.flag ? Join::ADD : Join::STORE;
    float* target = last ? batch.logits : out->data;
#if defined(GILIR_WEIGHTS)
    using W = Quantized<GILIR_WEIGHTS, T>;
    if (op.eight_bits)
      return linear<W>({in.data, rows, in.stride, {static_cast<const W*>(op.weight), op.n, op.k}, op.table, bias, join,
                        op.scale, target, out_stride}, thread, threads, scratch);
#endif
    linear<T>({in.data, rows, in.stride, {static_cast<const T*>(op.weight), op.n, op.k}, bias, join, op.scale, target,
               out_stride}, thread, threads, scratch);
  }

  // One expert after the other, each with the pairs that chose it; threads share the columns of each.
  void run_experts(const Op& op, int thread, int threads) {
    const Buffer &in = buffers_[static_cast<size_t>(op.in)], &out = buffers_[static_cast<size_t>(op.out)];
    LinearScratch& scratch = *linear_scratch_[static_cast<size_t>(thread)];
    const int64_t size = padded(op.n, PANEL) * padded(op.k, K_MULTIPLE);
    for (int64_t expert = 0; expert < op.experts; expert++) {
      const int64_t begin = routes_.begin(expert), count = routes_.begin(expert + 1) - begin;
      if (count == 0) continue;
      const T* weight = static_cast<const T*>(op.weight) + expert * size;
      const T* bias = op.bias == nullptr ? nullptr : static_cast<const T*>(op.bias) + expert * op.n;
      linear<T>({in.row(begin), count, in.stride, {weight, op.n, op.k}, bias, Join::STORE, 1.0f, out.row(begin),
                 out.stride}, thread, threads, scratch);
    }
  }

  void run_attention(const Op& op, const Batch& batch, AttentionScratch& scratch, Pool& pool) {
    const Buffer &in = buffers_[static_cast<size_t>(op.in)], &out = buffers_[static_cast<size_t>(op.out)];
    const Attention<T> work{in.data, in.stride, static_cast<const T*>(batch.k_cache[op.layer]),
                            static_cast<const T*>(batch.v_cache[op.layer]), out.data, out.stride, batch.query_start,
                            batch.context_lens, batch.block_tables, batch.table_stride,
                            static_cast<int>(batch.block_size), op.heads, op.kv_heads, op.head_dim, op.window, op.scale,
                            op.softcap, static_cast<const T*>(op.weight)};
    const int64_t count = static_cast<int64_t>(items_.size());
    const auto claim = [&] { return next_task_.fetch_add(1, std::memory_order_relaxed); };
    const auto each = [&](int64_t tasks, auto&& task) {
      for (int64_t i; (i = claim()) < tasks;) task(i);
    };
    scratch.found = false;
    if (!split_) {
      for (int64_t i = claim(), next; i < count; i = next) {
        next = claim();
        attend(work, items_[static_cast<size_t>(i)], next < count ? &items_[static_cast<size_t>(next)] : nullptr, scratch);
      }
      return;
    }
    each(count * split_attention_.most_parts, [&](int64_t i) { split_attention_.attend(work, items_, i, scratch); });
    sync(pool);
    each(count, [&](int64_t i) { split_attention_.finish(work, items_, i, scratch); });
  }

  std::vector<Op> ops_;
  std::vector<Buffer> buffers_;
  std::vector<AttentionItem> items_;
  SplitAttention split_attention_;
  std::vector<std::unique_ptr<AttentionScratch>> attention_scratch_;  // one a thread
  std::vector<std::unique_ptr<LinearScratch>> linear_scratch_;  // likewise
  Routes routes_;
  bool split_ = false;
  alignas(64) std::atomic<int64_t> next_task_{0};
};

}  // namespace gilir

using namespace gilir;

// What the functions below answer: no exception leaves the library.
constexpr int32_t DONE = 0, NO_MEMORY = 1, UNSOUND_BATCH = 2, FAILED = 3;

template <class F> static int32_t guarded(F&& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  } catch (...) {
    return FAILED;
  }
}

#pragma GCC visibility push(default)
extern "C" {

int64_t gilir_packed_size(int64_t n, int64_t k) { return padded(n, PANEL) * padded(k, K_MULTIPLE); }

// weight: [n, k]; target: `gilir_packed_size` elements; of the model's format, or of eight bits each.
int32_t gilir_pack(const void* weight, int64_t n, int64_t k, void* target, int32_t eight_bits, int32_t threads) {
  const auto work = [&](int thread) {
    const Share share((n + PANEL - 1) / PANEL, thread, threads);
    if (eight_bits) return pack(static_cast<const i8*>(weight), n, k, static_cast<i8*>(target), share.begin, share.end);
    pack(static_cast<const T*>(weight), n, k, static_cast<T*>(target), share.begin, share.end);
  };
  return guarded([&] { return Pool::instance().run(threads, work), DONE; });
}

int32_t gilir_create(const Op* ops, int64_t count, const int64_t* widths, int64_t buffers, void** decoder) {
  return guarded([&] { return *decoder = new Decoder(ops, count, widths, buffers), DONE; });
}

void gilir_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

int32_t gilir_run(void* decoder, const Batch* batch) {
  Decoder& program = *static_cast<Decoder*>(decoder);
  if (!program.accepts(*batch)) return UNSOUND_BATCH;
  return guarded([&] { return program.run(*batch), DONE; });
}

}
#pragma GCC visibility pop
