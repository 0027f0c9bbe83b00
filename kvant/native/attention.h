// Attention of single rows over the paged cache: decode, verification, and every row in deterministic mode.
//
//     o_i = sum_j softmax_j(cap(scale q_i . k_j)) v_j,   j from max(0, p_i - W + 1) to p_i
//
// A row's keys are cut at multiples of SPAN positions; spans are the unit of work, and are merged afterwards:
//
//     span s: m_s = max score, l_s = sum e^(score - m_s), a_s = sum e^(score - m_s) v
//     all:    m = max m_s, o = sum e^(m_s - m) a_s / sum e^(m_s - m) l_s
//
// The cuts depend on positions alone, so a row's result does not depend on its company. All query heads of a kv head are
// served together: keys and values are read and widened once.
#pragma once

#include <vector>

#include "rows.h"

namespace kvant {

constexpr int SPAN = 256;
constexpr int MAX_HEADS_TOGETHER = 4;
constexpr int PREFETCH_POSITIONS = 32;

struct AttentionRow {
  const float* q;                // of the first query head
  const int32_t* table;          // block table of the sequence
  int from, to;                  // positions [from, to), inside one span
  float scale, cap;

  const uint16_t* unit(const LayerCache& cache, int position, int head) const {
    return cache.unit(table[position / cache.block_size], position % cache.block_size / 16, head);
  }

  // What to prefetch while the keys (or values) of `position` are read: blocks lie anywhere, which no hardware foresees. Keys
  // are followed by the same head's values, values by the next head's keys.
  const uint16_t* later(const LayerCache& cache, int position, int head, bool values) const {
    const int ahead = position + PREFETCH_POSITIONS, size = cache.head_dim;
    if (ahead < to) return unit(cache, ahead, head) + (values ? 16 * size : 0);
    const int wrapped = from + ahead - to < to ? from + ahead - to : from;
    if (!values) return unit(cache, wrapped, head) + 16 * size;
    return unit(cache, wrapped, head + 1 < cache.kv_heads ? head + 1 : head);
  }
};

// Scores of `Heads` query heads, q [Heads, size], against positions [from, to) -> scores [Heads][SPAN], masked with 0 weight.
template <int Heads>
static inline void span_scores(const AttentionRow& row, const LayerCache& cache, int head, float (*scores)[SPAN], float* largest_of) {
  const int size = cache.head_dim, first = row.from / SPAN * SPAN;
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 top[Heads];
  for (int g = 0; g < Heads; ++g) top[g] = splat(-INFINITY);
  for (int p = row.from / 16 * 16; p < row.to; p += 16) {
    const uint16_t* keys = row.unit(cache, p, head);
    const uint16_t* later = row.later(cache, p, head, false);
    f32x16 even[Heads] = {}, odd[Heads] = {};
    for (int h = 0; h < size; h += 2) {
      prefetch(later + 16 * h);
      const f32x16 k0 = from_half(keys + 16 * h), k1 = from_half(keys + 16 * h + 16);
      for (int g = 0; g < Heads; ++g) {
        even[g] += k0 * row.q[g * size + h];
        odd[g] += k1 * row.q[g * size + h + 1];
      }
    }
    const i32x16 position = lane + p;
    const i32x16 visible = (position >= row.from) & (position < row.to);
    for (int g = 0; g < Heads; ++g) {
      f32x16 s = (even[g] + odd[g]) * row.scale;
      if (row.cap > 0.0f) s = soft_cap(s, row.cap);
      s = visible ? s : splat(-INFINITY);
      top[g] = maximum(top[g], s);
      store(&scores[g][p - first], s);
    }
  }
  for (int g = 0; g < Heads; ++g) largest_of[g] = largest(top[g]);
}

// out [Heads, size] = sum over positions of weights [Heads][SPAN] * values; `Wide` registers of a head at a time.
template <int Heads, int Wide>
static inline void span_values(const AttentionRow& row, const LayerCache& cache, int head, const float (*weights)[SPAN], int column,
                               float* out) {
  const int size = cache.head_dim, first = row.from / SPAN * SPAN;
  f32x16 acc[Heads][Wide] = {};
  for (int p = row.from; p < row.to;) {
    const uint16_t* unit = row.unit(cache, p, head) + 16 * size + column;
    const uint16_t* later = row.later(cache, p, head, true) + column;
    const int stop = p / 16 * 16 + 16 < row.to ? p / 16 * 16 + 16 : row.to;
    for (; p < stop; ++p) {
      const uint16_t* values = unit + p % 16 * size;
      for (int w = 0; w < Wide; w += 2) prefetch(later + p % 16 * size + w * LANES);
      for (int w = 0; w < Wide; ++w) {
        const f32x16 v = from_half(values + w * LANES);
        for (int g = 0; g < Heads; ++g) acc[g][w] += v * weights[g][p - first];
      }
    }
  }
  for (int g = 0; g < Heads; ++g)
    for (int w = 0; w < Wide; ++w) store(out + g * size + column + w * LANES, acc[g][w]);
}

// head_dim that is no multiple of 16: column by column.
static inline void span_values_tail(const AttentionRow& row, const LayerCache& cache, int head, const float* weights, int column,
                                    float* out) {
  const int size = cache.head_dim, first = row.from / SPAN * SPAN;
  for (int h = column; h < size; ++h) {
    float total = 0.0f;
    for (int p = row.from; p < row.to; ++p) {
      const uint16_t* unit = row.unit(cache, p, head);
      total += weights[p - first] * from_half(unit[16 * size + p % 16 * size + h]);
    }
    out[h] = total;
  }
}

// One span for `Heads` query heads: values [Heads, size] not yet divided, and per head its largest score and sum.
template <int Heads>
static void attend_span(const AttentionRow& row, const LayerCache& cache, int head, float* out, float* top, float* total) {
  alignas(64) float scores[Heads][SPAN];
  const int size = cache.head_dim, first = row.from / SPAN * SPAN;
  span_scores<Heads>(row, cache, head, scores, top);
  const int begin = row.from / 16 * 16 - first, end = row.to - first;
  for (int g = 0; g < Heads; ++g) {
    f32x16 sums = {};
    for (int i = begin; i < end; i += LANES) {
      const f32x16 s = load(&scores[g][i]);
      // A masked score is -inf; the clamp inside exponential() would leave 1e-38 of it.
      const f32x16 e = s == -INFINITY ? f32x16{} : exponential(s - top[g]);
      sums += e;
      store(&scores[g][i], e);
    }
    total[g] = sum(sums);
  }
  int column = 0;
  for (; column + 4 * LANES <= size; column += 4 * LANES) span_values<Heads, 4>(row, cache, head, scores, column, out);
  for (; column + LANES <= size; column += LANES) span_values<Heads, 1>(row, cache, head, scores, column, out);
  if (column < size)
    for (int g = 0; g < Heads; ++g) span_values_tail(row, cache, head, scores[g], column, out + g * size);
}

// One span for all query heads that share kv head `head`: `row.q` and `out` are [heads, size].
static inline void attend_heads(AttentionRow row, const LayerCache& cache, int head, int heads, float* out, float* top, float* total) {
  while (heads > 0) {
    const int now = heads < MAX_HEADS_TOGETHER ? heads : MAX_HEADS_TOGETHER;
    switch (now) {
      case 1: attend_span<1>(row, cache, head, out, top, total); break;
      case 2: attend_span<2>(row, cache, head, out, top, total); break;
      case 3: attend_span<3>(row, cache, head, out, top, total); break;
      default: attend_span<4>(row, cache, head, out, top, total); break;
    }
    heads -= now;
    row.q += now * cache.head_dim;
    out += now * cache.head_dim;
    top += now;
    total += now;
  }
}

// Merges `count` spans of one head. values [count][stride], top and total [count][stride2]; writes out [size].
static inline void merge_spans(const float* values, const float* top, const float* total, int count, int64_t stride, int64_t stride2,
                               int size, float* out) {
  float m = -INFINITY;
  for (int s = 0; s < count; ++s) m = top[s * stride2] > m ? top[s * stride2] : m;
  float share[64], sum_of = 0.0f;
  std::vector<float> many;
  float* shares = share;
  if (count > 64) {
    many.resize(count);
    shares = many.data();
  }
  for (int s = 0; s < count; ++s) {
    shares[s] = std::exp(top[s * stride2] - m);
    sum_of += shares[s] * total[s * stride2];
  }
  for (int i = 0; i < size; ++i) {
    float o = 0.0f;
    for (int s = 0; s < count; ++s) o += shares[s] * values[s * stride + i];
    out[i] = o / sum_of;
  }
}

}  // namespace kvant
