// Mixture of experts: which experts a row goes through, and the sum of what they give. Reference: kernels/moe.py.
//
// Pairs of a row and one of its experts are sorted by expert, so that an expert's weight is read once, and only where
// some row chose it. The products are those of gemm.h: a pair's result does not depend on the pairs beside it.
#pragma once
#include <numeric>

#include "gemm.h"

namespace gilir {

class Routes {
 public:
  void reserve(int64_t rows, int64_t experts, int64_t each) {
    experts_ = experts, each_ = each;
    const size_t pairs = static_cast<size_t>(rows * each);
    if (ids_.size() < pairs) ids_.resize(pairs), weights_.resize(pairs), pair_of_.resize(pairs), row_of_.resize(pairs);
    begin_.resize(static_cast<size_t>(experts) + 1);
  }

  // The experts with the largest logits, in falling order, ties by lowest id; their weights are those of a softmax over
  // all experts, or over the chosen ones. logits: [experts].
  template <class A> void choose(const A* logits, int64_t row, bool renormalize) {
    int32_t* ids = ids_.data() + row * each_;
    float* weights = weights_.data() + row * each_;
    for (int64_t place = 0; place < each_; place++) {
      int64_t best = -1;
      for (int64_t id = 0; id < experts_; id++)
        if (std::find(ids, ids + place, id) == ids + place && (best < 0 || rank(to_float(logits[id])) > rank(to_float(logits[best]))))
          best = id;
      ids[place] = static_cast<int32_t>(best);
    }
    const float highest = to_float(logits[ids[0]]);
    f32x16 sums = zero();
    for (int64_t i = 0; i < experts_; i += LANES) {
      const int count = static_cast<int>(std::min<int64_t>(experts_ - i, LANES));
      alignas(64) float lanes[LANES] = {};
      store_part(lanes, exp(load_part(logits + i, count) - set1(highest)), count);
      sums = sums + load(lanes);
    }
    const float sum = sum_lanes(sums);
    for (int64_t place = 0; place < each_; place++) weights[place] = exp(to_float(logits[ids[place]]) - highest) / sum;
    if (!renormalize) return;
    const float chosen = std::accumulate(weights, weights + each_, 0.0f);
    for (int64_t place = 0; place < each_; place++) weights[place] /= chosen;
  }

  // Sorts the pairs of rows 0 .. rows - 1 by expert, and within one by row.
  void group(int64_t rows) {
    std::fill(begin_.begin(), begin_.end(), 0);
    for (int64_t i = 0; i < rows * each_; i++) begin_[static_cast<size_t>(ids_[static_cast<size_t>(i)]) + 1]++;
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    next_.assign(begin_.begin(), begin_.end() - 1);
    for (int64_t i = 0; i < rows * each_; i++) {
      const int64_t pair = next_[static_cast<size_t>(ids_[static_cast<size_t>(i)])]++;
      pair_of_[static_cast<size_t>(i)] = pair;
      row_of_[static_cast<size_t>(pair)] = i / each_;
    }
  }

  int64_t row_of(int64_t pair) const { return row_of_[static_cast<size_t>(pair)]; }
  // An expert's pairs are [begin(expert), begin(expert + 1)).
  int64_t begin(int64_t expert) const { return begin_[static_cast<size_t>(expert)]; }

  // out = the weighted sum of a row's pairs, in the order they were chosen, rounded to T. pairs, out: rows of `stride`.
  template <class T, class A> void combine(const A* pairs, int64_t stride, int64_t row, A* out) const {
    const int64_t first = row * each_;
    for (int64_t i = 0; i < stride; i += LANES) {
      f32x16 total = zero();
      for (int64_t place = first; place < first + each_; place++) {
        const A* pair = pairs + pair_of_[static_cast<size_t>(place)] * stride;
        total = total + set1(weights_[static_cast<size_t>(place)]) * load(pair + i);
      }
      store(out + i, round_to<T>(total));
    }
  }

 private:
  // As integers, ordered like the floats; -0 is 0, NaN has a place too.
  static int32_t rank(float x) {
    const int32_t bits = static_cast<int32_t>(float_to_bits(x + 0.0f));
    return bits ^ ((bits >> 31) & 0x7fffffff);
  }

  int64_t experts_ = 0, each_ = 0;
  std::vector<int32_t> ids_;     // [rows, each]
  std::vector<float> weights_;   // [rows, each]
  std::vector<int64_t> pair_of_, row_of_, begin_, next_;
};

}  // namespace gilir
