// Attention of many rows of one sequence with AMX tiles: prompts, and chunks of them.
//
// One item is 32 rows of a sequence and one kv head. Positions pass in strides of 64 (FlashAttention-2's order; Dao, 2023):
//
//     K, V of 64 positions -> bf16 tiles, once for all query heads of the kv head
//     for each head:   S [32, 64] = Q K^T            tiles
//                      m' = max(m, max S), P = e^(S - m'), l = l e^(m - m') + sum P, O = O e^(m - m')
//                      O [32, H] += P V               tiles
//     out = O / l
//
// Q and P are rounded to bf16, sums stay fp32. Positions outside [from, to) of a row get weight 0; their values are replaced
// by zeros, because the cache may hold anything there and 0 * NaN is NaN.
#pragma once

#include "attention.h"
#include "tile.h"

namespace kvant {
constexpr int QUERY_ROWS = 32;
}

#if defined(KVANT_AMX)

namespace kvant {

constexpr int POSITIONS = 64;
constexpr float LOG2_E = 1.44269504f;

struct TileAttention {
  const float* q;        // of the first query head and row
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  const int32_t* table;
  int first_position;    // of the first row
  int rows, heads, window;
  float scale, cap;
};

// One thread's memory for an item.
struct TileScratch {
  Aligned<uint16_t> q, k, v, p;
  Aligned<float> s, o, m, l;

  void reserve(int heads, int size) {
    q.reserve((size_t)heads * QUERY_ROWS * size);
    k.reserve((size_t)POSITIONS * size);
    v.reserve((size_t)POSITIONS * size);
    p.reserve((size_t)QUERY_ROWS * POSITIONS);
    s.reserve((size_t)QUERY_ROWS * POSITIONS);
    o.reserve((size_t)heads * QUERY_ROWS * size);
    m.reserve((size_t)heads * QUERY_ROWS);
    l.reserve((size_t)heads * QUERY_ROWS);
  }
};

// Two fp32 rows as one line of bf16 pairs: (a0, b0), (a1, b1), ...
static inline __m512i interleave(f32x16 a, f32x16 b) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}

// Queries of all heads, scaled (and in units of log2 e, unless a soft cap comes between), as tiles [head][2][size / 32]; rows beyond the item are zero.
static inline void load_queries(const TileAttention& item, int size, uint16_t* q) {
  const float scale = item.cap > 0.0f ? item.scale : item.scale * LOG2_E;
  for (int head = 0; head < item.heads; ++head)
    for (int row = 0; row < QUERY_ROWS; ++row)
      for (int h = 0; h < size; h += 32) {
        uint16_t* line = q + (((size_t)head * 2 + row / 16) * (size / 32) + h / 32) * TILE_ELEMENTS + row % 16 * 32;
        const float* x = item.q + row * item.q_stride + head * size + h;
        const bool real = row < item.rows;
        const f32x16 low = real ? load(x) * scale : f32x16{}, high = real ? load(x + 16) * scale : f32x16{};
        _mm512_store_si512(line, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
      }
}

// Keys of positions [at, at + 64) as tiles [4][size / 32], values as tiles [2][size / 16]; only [from, to) is real.
static inline void load_positions(const TileAttention& item, const LayerCache& cache, int head, int at, int from, int to, uint16_t* k,
                                  uint16_t* v) {
  const int size = cache.head_dim;
  for (int unit = 0; unit < POSITIONS / 16; ++unit) {
    const int first = at + 16 * unit;
    uint16_t* k_tiles = k + (size_t)unit * (size / 32) * TILE_ELEMENTS;
    uint16_t* v_tiles = v + (size_t)(unit / 2) * (size / 16) * TILE_ELEMENTS + unit % 2 * 8 * 32;
    const bool real = first < to && first + 16 > from;
    const uint16_t* keys = real ? cache.unit(item.table[first / cache.block_size], first % cache.block_size / 16, head) : nullptr;
    const uint16_t* values = keys + 16 * size;
    for (int h = 0; h < size; h += 2) {
      const __m512i line = real ? interleave(from_half(keys + 16 * h), from_half(keys + 16 * h + 16)) : _mm512_setzero_si512();
      _mm512_store_si512(k_tiles + h * 16, line);  // tile h / 32, line (h % 32) / 2
    }
    for (int p = 0; p < 16; p += 2) {
      const bool even = real && first + p >= from && first + p < to, odd = real && first + p + 1 >= from && first + p + 1 < to;
      for (int h = 0; h < size; h += 16) {
        const f32x16 a = even ? from_half(values + p * size + h) : f32x16{};
        const f32x16 b = odd ? from_half(values + (p + 1) * size + h) : f32x16{};
        _mm512_store_si512(v_tiles + (size_t)(h / 16) * TILE_ELEMENTS + p / 2 * 32, interleave(a, b));
      }
    }
  }
}

// c [32, 32] at `stride` floats (+)= a [2][steps] tiles * b tiles: b0 and b1 are tiles of neighbouring 16 columns.
static inline void multiply_tiles(const uint16_t* a, int a_steps, const uint16_t* b0, const uint16_t* b1, int b_step, int steps, float* c,
                                  int stride, bool fresh) {
  const int64_t bytes = (int64_t)stride * 4;
  fence_memory();
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, c, bytes);
    _tile_loadd(1, c + 16, bytes);
    _tile_loadd(2, c + 16 * (int64_t)stride, bytes);
    _tile_loadd(3, c + 16 * (int64_t)stride + 16, bytes);
  }
  for (int t = 0; t < steps; ++t) {
    _tile_loadd(4, a + t * TILE_ELEMENTS, 64);
    _tile_loadd(5, a + (a_steps + t) * TILE_ELEMENTS, 64);
    _tile_loadd(6, b0 + (int64_t)t * b_step, 64);
    _tile_loadd(7, b1 + (int64_t)t * b_step, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, bytes);
  _tile_stored(1, c + 16, bytes);
  _tile_stored(2, c + 16 * (int64_t)stride, bytes);
  _tile_stored(3, c + 16 * (int64_t)stride + 16, bytes);
  fence_memory();
}

// 2^x for x <= 0, to four digits more than bf16 keeps; 1e-38 for -inf, which no sum notices; NaN for NaN.
static inline f32x16 power_of_two(f32x16 x) {
  // Below -126 results are denormal, and every one of them costs 100 cycles.
  x = (f32x16)_mm512_max_ps(_mm512_set1_ps(-126.0f), (__m512)x);  // the second operand is what a NaN comes out as
  const f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)x, 0x08), r = x - n;
  f32x16 p = splat(1.3333558e-3f);
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
}

// One row's 64 scores (in units of log2 e) become bf16 weights in the tiles of P; m, l and the row of O follow the maximum.
static inline void softmax_row(const TileAttention& item, int row, int at, float* s, uint16_t* p, float* o, int size, float* m, float* l) {
  const int position = item.first_position + row;
  const int low = item.window > 0 && position + 1 > item.window ? position + 1 - item.window : 0;
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const bool whole = at >= low && at + POSITIONS - 1 <= position;
  f32x16 x[4];
  for (int i = 0; i < 4; ++i) {
    x[i] = load(s + 16 * i);
    if (item.cap > 0.0f) x[i] = soft_cap(x[i], item.cap) * LOG2_E;
    if (!whole) {
      const i32x16 j = lane + (at + 16 * i);
      x[i] = (j >= low) & (j <= position) ? x[i] : splat(-INFINITY);
    }
  }
  float highest = largest(maximum(maximum(x[0], x[1]), maximum(x[2], x[3])));
  if (!(highest > *m)) highest = *m;
  const float base = highest == -INFINITY ? 0.0f : highest;  // nothing visible so far: weights of 1e-38
  for (int i = 0; i < 4; ++i) x[i] = power_of_two(x[i] - base);
  if (highest > *m) {
    const float shrink = power_of_two(splat(*m - highest))[0];
    *l *= shrink;
    for (int h = 0; h < size; h += LANES) store(o + h, load(o + h) * shrink);
    *m = highest;
  }
  *l += sum((x[0] + x[1]) + (x[2] + x[3]));
  for (int i = 0; i < 2; ++i)
    _mm512_store_si512(p + i * TILE_ELEMENTS, (__m512i)_mm512_cvtne2ps_pbh((__m512)x[2 * i + 1], (__m512)x[2 * i]));
}

// One item: all query heads of kv head `head`, `item.rows` <= 32 rows. head_dim is a multiple of 32.
static void attend_tiles(const TileAttention& item, const LayerCache& cache, int head, TileScratch& scratch) {
  const int size = cache.head_dim, last = item.first_position + item.rows - 1, to = last + 1;
  const int from = item.window > 0 && item.first_position + 1 > item.window ? item.first_position + 1 - item.window : 0;
  uint16_t *q = scratch.q.data(), *k = scratch.k.data(), *v = scratch.v.data(), *p = scratch.p.data();
  float *s = scratch.s.data(), *o = scratch.o.data(), *m = scratch.m.data(), *l = scratch.l.data();
  load_queries(item, size, q);
  std::memset(o, 0, sizeof(float) * item.heads * QUERY_ROWS * size);
  for (int i = 0; i < item.heads * QUERY_ROWS; ++i) {
    m[i] = -INFINITY;
    l[i] = 0.0f;
  }
  for (int at = from / POSITIONS * POSITIONS; at < to; at += POSITIONS) {
    load_positions(item, cache, head, at, from, to, k, v);
    for (int g = 0; g < item.heads; ++g) {
      float* heads_o = o + (size_t)g * QUERY_ROWS * size;
      const int steps = size / 32;
      for (int column = 0; column < POSITIONS; column += 32) {
        const uint16_t* b = k + (size_t)(column / 16) * steps * TILE_ELEMENTS;
        multiply_tiles(q + (size_t)g * 2 * steps * TILE_ELEMENTS, steps, b, b + steps * TILE_ELEMENTS, TILE_ELEMENTS, steps, s + column,
                       POSITIONS, true);
      }
      for (int row = 0; row < QUERY_ROWS; ++row)
        softmax_row(item, row, at, s + row * POSITIONS, p + (row / 16 * 2) * TILE_ELEMENTS + row % 16 * 32, heads_o + row * size, size,
                    &m[g * QUERY_ROWS + row], &l[g * QUERY_ROWS + row]);
      for (int column = 0; column < size; column += 32) {
        const uint16_t* b = v + (size_t)(column / 16) * TILE_ELEMENTS;
        multiply_tiles(p, 2, b, b + TILE_ELEMENTS, size / 16 * TILE_ELEMENTS, 2, heads_o + column, size, false);
      }
    }
  }
  for (int g = 0; g < item.heads; ++g)
    for (int row = 0; row < item.rows; ++row) {
      const float* from_o = o + ((size_t)g * QUERY_ROWS + row) * size;
      float* to_out = item.out + row * item.out_stride + g * size;
      const float inverse = 1.0f / l[g * QUERY_ROWS + row];
      for (int h = 0; h < size; h += LANES) store(to_out + h, load(from_o + h) * inverse);
    }
}

}  // namespace kvant
#endif
