// Draws with temperature, top-k, top-p and min-p.
//
// A draw is the largest of scaled logit + noise (Gumbel-max). The noise of a token is a function of the row's key and the
// token's id, so nothing is kept between steps; `sampling/host.py` is the same arithmetic in numpy, and the reference in tests:
//
//     scaled[i] = x[i] / temperature - max            fp32
//     noise[i]  = -log(-log(u[i])),   u[i] = (hash(key, i) + 1/2) / 2^32          fp64
//
// Two logarithms per token would cost 1 ms for a vocabulary of 49,152. But -log(u) >= 1 - u, so a token can only win against
// the best sum B so far where 1 - u <= e^(scaled - B): a hash and an fp32 exponential for 16 tokens at a time say no to nearly
// all of them, and the few others are computed exactly. Thresholds need no sorted vocabulary either: top-k keeps a heap, top-p
// halves a range of probabilities until few are left in it, and sorts those.
//
// Equal to the reference bit by bit in `scaled`, in top-k and in min-p; noise may differ in the last bit of fp64, and top-p in
// a token whose cumulative probability is within rounding (about 1e-6) of the limit.
#pragma once

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "memory.h"
#include "select.h"

namespace kvant {

// One row's draws; field by field in abi.py.
struct DrawRow {
  const float* logits;   // [count]
  const uint64_t* keys;  // [draws]
  int64_t* ids;          // [draws]
  int64_t top_k;         // 0: off
  float temperature, top_p;  // top_p 1: off
  float log_min_p;           // -infinity: off
  int32_t draws;
};

// The finaliser of MurmurHash3, as in sampling/random.py.
template <class Word>
static inline Word mix32(Word x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

template <class Word>
static inline Word hash_token(uint64_t key, Word token) {
  return mix32(mix32(token ^ (uint32_t)key) + (uint32_t)(key >> 32));
}

static inline double gumbel(uint64_t key, uint32_t token) {
  return -std::log(-std::log(((double)hash_token(key, token) + 0.5) * 0x1p-32));
}

// One row's logits after temperature: the best one's at 0.
struct Scaled {
  const float* x;
  int count;
  float temperature, top;  // the largest of x / temperature

  float at(int i) const { return x[i] / temperature - top; }
  f32x16 at16(int i) const {
    if (i + LANES <= count) return load(x + i) / temperature - top;
    float lanes[LANES];
    for (int j = 0; j < LANES; ++j) lanes[j] = i + j < count ? at(i + j) : -INFINITY;
    return load(lanes);
  }
};

constexpr int SUM_VECTORS = 16;           // added in fp32 before they join a sum in fp64
constexpr float LEAST_EXPONENT = -86.0f;  // probabilities from here on are taken for zero
constexpr float LEAST = 1e-38f;           // all others are larger

// Sum and number of the values in [low, infinity). `p` [count], a multiple of 16 long.
static inline std::pair<double, int> mass_above(const float* p, int count, float low) {
  double total = 0.0;
  i32x16 number = {};
  for (int i = 0; i < count;) {
    f32x16 part = {};
    for (const int end = std::min(count, i + SUM_VECTORS * LANES); i < end; i += LANES) {
      const f32x16 v = load(p + i);
      const i32x16 inside = (i32x16)(v >= low);
      part += inside ? v : f32x16{};
      number -= inside;
    }
    total += (double)sum(part);
  }
  int many = 0;
  for (int lane = 0; lane < LANES; ++lane) many += number[lane];
  return {total, many};
}

// The smallest of the probabilities that make up the smallest set with a share of `top_p` of the whole; `p` as above, its
// largest value 1, its zeros not there at all.
//
// Invariant: values >= high are in the set, those < low are not.
static inline float top_p_limit(const float* p, int count, float top_p) {
  const auto [whole, all] = mass_above(p, count, LEAST);
  const double wanted = (double)top_p * whole;
  float low = LEAST, high = 2.0f;
  double mass = 0.0;  // of what is >= high
  int above = 0, inside = all;
  while (inside > SORT_LIMIT) {
    const float middle = between(low, high);
    if (middle == low) break;  // all equal
    const auto [heavier, number] = mass_above(p, count, middle);
    if (heavier < wanted) {  // all of these are in the set, and more
      high = middle;
      mass = heavier;
      inside -= number - above;
      above = number;
    } else {
      low = middle;
      inside = number - above;
    }
  }
  std::vector<float> rest = values_between(p, count, low, high);
  std::sort(rest.begin(), rest.end(), std::greater<float>());
  float limit = high;
  for (const float value : rest) {
    if (mass >= wanted && limit <= 1.0f) break;  // at least the best token stays
    limit = value;
    mass += value;
  }
  return limit;
}

// What a draw must not fall below, in scaled logits.
static inline float threshold(const DrawRow& row, const Scaled& s, Aligned<float>& scratch) {
  float limit = -INFINITY;
  if (row.top_k > 0) limit = kth_largest(s.x, s.count, (int)std::min<int64_t>(row.top_k, s.count)) / s.temperature - s.top;
  if (row.top_p < 1.0f) {
    const int padded = (s.count + LANES - 1) / LANES * LANES;
    scratch.reserve(padded);
    for (int i = 0; i < padded; i += LANES) {
      const f32x16 v = s.at16(i);
      const i32x16 there = v >= limit && v > LEAST_EXPONENT;
      store(scratch.data() + i, any(there) ? (there ? exponential(v) : f32x16{}) : f32x16{});
    }
    const float least = top_p_limit(scratch.data(), padded, row.top_p);
    float lowest = 0.0f;  // the lowest scaled logit whose probability is in the set
    for (int i = 0; i < padded; i += LANES) {
      if (!any(load(scratch.data() + i) >= least)) continue;
      for (int j = i; j < i + LANES; ++j)
        if (scratch.data()[j] >= least) lowest = std::min(lowest, s.at(j));
    }
    limit = std::max(limit, lowest);
  }
  return std::max(limit, row.log_min_p);
}

// The token with the largest scaled logit + noise among those at or above `limit`.
static inline int draw_token(const Scaled& s, uint64_t key, float limit, int top_place) {
  int best = top_place;
  double most = (double)s.at(top_place) + gumbel(key, (uint32_t)top_place);
  const float inverse = 1.0f / s.temperature;
  const auto consider = [&](int i) {
    const float scaled = s.at(i);
    if (!(scaled >= limit)) return;
    const double value = (double)scaled + gumbel(key, (uint32_t)i);
    if (value > most || (value == most && i < best)) {
      most = value;
      best = i;
    }
  };
  // Slack: x times 1 / temperature may be off by 2^-22 of itself, the exponential by 3e-7, the float of the hash by 2^-24.
  const float reach = 1e-4f + 1e-6f * std::fabs(s.top);
  const float floor = limit - reach;
  u32x16 tokens;
  for (int j = 0; j < LANES; ++j) tokens[j] = (uint32_t)j;
  int i = 0;
  for (; i + LANES <= s.count; i += LANES, tokens += LANES) {
    const f32x16 scaled = load(s.x + i) * inverse - s.top;
    const f32x16 beyond = __builtin_convertvector(~hash_token(key, tokens), f32x16) * 0x1p-32f;  // 1 - u, nearly
    const f32x16 allowed = exponential(scaled - ((float)most - reach)) * 1.001f;
    if (!any(beyond <= allowed && scaled >= floor)) continue;
    for (int j = 0; j < LANES; ++j)
      if (beyond[j] <= allowed[j] && scaled[j] >= floor) consider(i + j);
  }
  for (; i < s.count; ++i) consider(i);
  return best;
}

// All draws of one row. A row without a finite best logit (NaN, everything forbidden) gives its place as it is.
static inline void draw_row(const DrawRow& row, int count, Aligned<float>& scratch) {
  const LogitScan scan = scan_logits(row.logits, count, 0);
  const Scaled s = {row.logits, count, row.temperature, scan.top / row.temperature};
  const bool usable = std::fabs(scan.top) <= 3.4028235e38f && std::fabs(s.top) <= 3.4028235e38f;
  const float limit = usable ? threshold(row, s, scratch) : 0.0f;
  for (int d = 0; d < row.draws; ++d) row.ids[d] = usable ? draw_token(s, row.keys[d], limit, scan.place) : scan.place;
}

}  // namespace kvant
