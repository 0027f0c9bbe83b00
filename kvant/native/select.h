// What choosing tokens needs from logits, without a second pass in Python: the largest, its place, log sum exp, and the top k.
#pragma once

#include <algorithm>
#include <utility>

#include "simd.h"

namespace kvant {

struct Summary {
  int64_t* ids;     // [R] place of the largest; the lowest of equals
  float* top;       // [R] the largest
  float* log_sum;   // [R] log sum exp
  uint8_t* finite;  // [R] no NaN, no infinity
};

static inline void summarize_row(const float* x, int count, int row, const Summary& out) {
  f32x16 best = splat(-INFINITY), zero = {};
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    const f32x16 v = load(x + i);
    best = maximum(best, v);
    zero += v * 0.0f;  // 0 for every finite number, NaN for NaN and infinity
  }
  float top = largest(best), rest = sum(zero);
  for (; i < count; ++i) {
    top = x[i] > top ? x[i] : top;
    rest += x[i] * 0.0f;
  }
  f32x16 sums = {};
  for (i = 0; i + LANES <= count; i += LANES) sums += exponential(load(x + i) - top);
  float total = sum(sums);
  for (; i < count; ++i) total += std::exp(x[i] - top);
  int place = 0;
  while (place < count - 1 && x[place] != top) ++place;
  out.ids[row] = place;
  out.top[row] = top;
  out.log_sum[row] = top + std::log(total);
  out.finite[row] = rest == 0.0f;
}

// The k largest in order, equals by place. One pass: what beats the smallest kept so far enters a heap.
static inline void top_k_row(const float* x, int count, int k, int64_t* ids, float* values) {
  typedef std::pair<float, int> Entry;
  const auto better = [](const Entry& a, const Entry& b) { return a.first > b.first || (a.first == b.first && a.second < b.second); };
  std::vector<Entry> heap;  // the worst kept entry on top
  heap.reserve(k + 1);
  for (int i = 0; i < count; i += LANES) {
    const int lanes = count - i < LANES ? count - i : LANES;
    if ((int)heap.size() == k && lanes == LANES && !(largest(load(x + i)) > heap.front().first)) continue;
    for (int j = 0; j < lanes; ++j) {
      const Entry entry = {x[i + j], i + j};
      if ((int)heap.size() == k && !better(entry, heap.front())) continue;
      heap.push_back(entry);
      std::push_heap(heap.begin(), heap.end(), better);
      if ((int)heap.size() <= k) continue;
      std::pop_heap(heap.begin(), heap.end(), better);
      heap.pop_back();
    }
  }
  std::sort_heap(heap.begin(), heap.end(), better);
  for (int i = 0; i < (int)heap.size(); ++i) {
    values[i] = heap[i].first;
    ids[i] = heap[i].second;
  }
}

}  // namespace kvant
