// The greedy choice, and the largest values, of rows of logits, without sorting a vocabulary.
#pragma once

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "simd.h"

namespace kvant {

// What is known of some neighbouring logits of a row.
struct LogitScan {
  float top;    // the largest
  int place;    // its column; the lowest of equals
  bool finite;  // neither NaN nor infinity

  // `later` scanned columns behind these.
  void join(const LogitScan& later) {
    if (later.top > top) {
      top = later.top;
      place = later.place;
    }
    finite &= later.finite;
  }
};

// Columns [first, first + count), x being the first of them; nothing at all is minus infinity.
static inline LogitScan scan_logits(const float* x, int count, int first) {
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
  const f32x16 wanted = splat(top);
  int place = 0;
  while (place + LANES <= count && !any(load(x + place) == wanted)) place += LANES;
  while (place < count - 1 && x[place] != top) ++place;
  return {top, first + std::max(0, std::min(place, count - 1)), rest == 0.0f};
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

// Floats as integers of the same order, and back.
static inline int32_t ordered(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

static inline float unordered(int32_t bits) {
  bits ^= bits >> 31 & 0x7fffffff;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The float halfway between two in that order; equal to `low` where there is none.
static inline float between(float low, float high) { return unordered((int32_t)(((int64_t)ordered(low) + ordered(high)) >> 1)); }

// The values in [low, high).
static inline std::vector<float> values_between(const float* x, int count, float low, float high) {
  std::vector<float> found;
  for (int i = 0; i < count; i += LANES) {
    const int lanes = std::min(LANES, count - i);
    if (lanes == LANES && !any(load(x + i) >= low && load(x + i) < high)) continue;
    for (int j = i; j < i + lanes; ++j)
      if (x[j] >= low && x[j] < high) found.push_back(x[j]);
  }
  return found;
}

static inline int number_above(const float* x, int count, float low) {
  i32x16 numbers = {};
  int i = 0, number = 0;
  for (; i + LANES <= count; i += LANES) numbers -= (i32x16)(load(x + i) >= low);
  for (; i < count; ++i) number += x[i] >= low;
  for (int lane = 0; lane < LANES; ++lane) number += numbers[lane];
  return number;
}

constexpr int HEAP_LIMIT = 256;  // for more than these, halving a range takes less time than a heap
constexpr int SORT_LIMIT = 128;  // so few values are sorted

// The k-th largest value, 1 <= k <= count. Invariant: fewer than k values are >= high, at least k are >= low.
static inline float kth_largest(const float* x, int count, int k) {
  if (k > HEAP_LIMIT) {
    float low = -INFINITY, high = INFINITY;
    int above = 0, inside = count;
    while (inside > SORT_LIMIT) {
      const float middle = between(low, high);
      if (middle == low) break;  // all equal
      const int number = number_above(x, count, middle);
      if (number < k) {
        high = middle;
        inside -= number - above;
        above = number;
      } else {
        low = middle;
        inside = number - above;
      }
    }
    std::vector<float> rest = values_between(x, count, low, high);
    if (k - above > (int)rest.size()) return low;  // some are not numbers
    std::nth_element(rest.begin(), rest.begin() + (k - above - 1), rest.end(), std::greater<float>());
    return rest[k - above - 1];
  }
  int64_t ids[HEAP_LIMIT];
  float values[HEAP_LIMIT];
  top_k_row(x, count, k, ids, values);
  return values[k - 1];
}

}  // namespace kvant
