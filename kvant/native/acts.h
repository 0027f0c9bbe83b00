// Activations of a linear, prepared once for all of its panels.
//
// Integer kernels take 8-bit codes with one scale per 32 columns: x[i] ~ scale[i / 32] * code[i], code = round(x * 127 / max|x|).
// Weights of unsigned codes need the sums of activation codes as well: sum_i (c_i - o) a_i = sum_i c_i a_i - o sum_i a_i.
// Dense kernels for few rows take fp32, tiles (AMX) take bf16. Each kernel finds what it needs of a block of rows at fixed
// distances from one pointer, and threads that prepare different blocks never write to the same cache line:
//
//     codes, scales, sums [row / block][column / 32][row % block]       bf16 [row / 16][column / 32][row % 16][column % 32]
//
// A block is ROW_BLOCK rows, or all where there are fewer: a single row then lies in as few cache lines as it can.
//
// The RMSNorm in front of a linear happens here: the normalised row exists only in registers.
#pragma once

#include "formats.h"
#include "memory.h"

namespace kvant {

enum Form { CODES = 1, VALUES = 2, TILES = 4 };

// Rows that the kernels for few rows take together.
#if defined(KVANT_AVX512)
constexpr int ROW_BLOCK = 8;
#else
constexpr int ROW_BLOCK = 4;  // half the registers, and half the time to compile
#endif

static inline int num_tiles(int columns) { return (columns + GROUP - 1) / GROUP; }

// Where the prepared rows of one linear lie.
struct Activations {
  int tiles;         // columns / 32, rounded up
  int block;         // rows of a block
  int8_t* codes;     // [rows / block, tiles, block, 32]
  float* scales;     // [rows / block, tiles, block]
  float* sums;       // the same: scale * sum of codes
  int32_t* minus32;  // the same: minus the sum of codes
  int32_t* minus16;  // [rows / block, tiles, 2, block]: of each half
  float* values;     // [rows, 32 tiles]: fp32, normalised
  uint16_t* bf16;    // [rows / 16, tiles, 16, 32]

  // Where row `row` of the first tile stands among the codes' rows; the next tile's is `block` further.
  size_t place(int row) const { return (size_t)(row / block) * tiles * block + row % block; }
};

// The memory behind them, shared by all linears of a program.
class ActivationMemory {
 public:
  void reserve(int rows, int columns, int forms) {
    const size_t n = (size_t)(rows + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK, t = (size_t)num_tiles(columns);
    if (forms & CODES) {
      codes_.reserve(n * t * 32);
      scales_.reserve(n * t);
      sums_.reserve(n * t);
      minus32_.reserve(n * t);
      minus16_.reserve(n * t * 2);
    }
    if (forms & VALUES) values_.reserve(n * t * 32);
    if (forms & TILES) bf16_.reserve((n + 15) / 16 * 16 * t * 32);
  }

  Activations view(int rows, int columns) const {
    return {num_tiles(columns), rows < ROW_BLOCK ? rows : ROW_BLOCK, codes_.data(), scales_.data(), sums_.data(), minus32_.data(), minus16_.data(), values_.data(), bf16_.data()};
  }

 private:
  Aligned<int8_t> codes_;
  Aligned<float> scales_, sums_, values_;
  Aligned<int32_t> minus32_, minus16_;
  Aligned<uint16_t> bf16_;
};

// 1 / rms(x).
static inline float inverse_rms(const float* x, int width, float eps) {
  f32x16 total = {};
  int i = 0;
  for (; i + LANES <= width; i += LANES) {
    const f32x16 v = load(x + i);
    total += v * v;
  }
  if (i < width) {
    const f32x16 v = load_part(x + i, width - i);
    total += v * v;
  }
  return 1.0f / std::sqrt(sum(total) / (float)width + eps);
}

// Magnitudes compared as integers: NaN is the largest of all, so that a broken row stays broken instead of looking small.
static inline float largest_magnitude(f32x16 a, f32x16 b) {
  const u32x16 x = float_to_bits(a) & 0x7fffffffu, y = float_to_bits(b) & 0x7fffffffu;
  const u32x16 both = x < y ? y : x;
#if defined(KVANT_AVX512)
  const uint32_t top = _mm512_reduce_max_epu32((__m512i)both);
#else
  uint32_t lanes[LANES];
  std::memcpy(lanes, &both, sizeof lanes);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] < lanes[i + width] ? lanes[i + width] : lanes[i];
  const uint32_t top = lanes[0];
#endif
  float v;
  std::memcpy(&v, &top, 4);
  return v;
}

// Columns 32 group ... of a row whose first tile stands at `place`.
static inline void quantize_group(f32x16 low, f32x16 high, int group, size_t place, int in_block, const Activations& a) {
  const float top = largest_magnitude(low, high);
  const float inverse = top > 1e-30f ? 127.0f / top : 0.0f;
  float scale = top / 127.0f;
  i32x16 c0, c1;
#if defined(KVANT_AVX512)
  c0 = (i32x16)_mm512_cvtps_epi32((__m512)(low * inverse));
  c1 = (i32x16)_mm512_cvtps_epi32((__m512)(high * inverse));
#else
  c0 = __builtin_convertvector(round_even(low * inverse), i32x16);
  c1 = __builtin_convertvector(round_even(high * inverse), i32x16);
#endif
  const size_t at = place + (size_t)group * a.block;
  int8_t* codes = &a.codes[at * 32];
#if defined(KVANT_AVX512)
  const __m128i low_codes = _mm512_cvtsepi32_epi8((__m512i)c0), high_codes = _mm512_cvtsepi32_epi8((__m512i)c1);
  _mm_storeu_si128((__m128i*)codes, low_codes);
  _mm_storeu_si128((__m128i*)codes + 1, high_codes);
  const __m128i ones = _mm_set1_epi8(1), zero = _mm_setzero_si128();  // four sums each; then pairs; then both in one register
  __m128i sums = _mm_hadd_epi32(_mm_dpbusd_epi32(zero, ones, low_codes), _mm_dpbusd_epi32(zero, ones, high_codes));
  sums = _mm_hadd_epi32(sums, sums);
  const int s0 = _mm_cvtsi128_si32(sums), s1 = _mm_extract_epi32(sums, 1);
#else
  int32_t lanes[32];
  std::memcpy(lanes, &c0, 64);
  std::memcpy(lanes + 16, &c1, 64);
  int s0 = 0, s1 = 0;
  for (int i = 0; i < 16; ++i) {
    codes[i] = (int8_t)lanes[i];
    codes[i + 16] = (int8_t)lanes[i + 16];
    s0 += lanes[i];
    s1 += lanes[i + 16];
  }
#endif
  a.scales[at] = scale;
  a.sums[at] = scale * (float)(s0 + s1);
  a.minus32[at] = -(s0 + s1);
  int32_t* halves = &a.minus16[2 * at - in_block];
  halves[0] = -s0;
  halves[a.block] = -s1;
}

static inline void put_bf16(f32x16 low, f32x16 high, int group, int64_t row, const Activations& a) {
  uint16_t* line = &a.bf16[(((size_t)row / 16 * a.tiles + group) * 16 + row % 16) * 32];
#if defined(KVANT_AMX)
  const __m512bh pair = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  std::memcpy(line, &pair, 64);
#else
  float lanes[32];
  store(lanes, low);
  store(lanes + 16, high);
  for (int i = 0; i < 32; ++i) line[i] = to_bf16(lanes[i]);
#endif
}

// Row `x` of `width` columns as row `row` of the activations, normalised first where `norm` is given.
static inline void prepare_row(const float* x, int width, const float* norm, float eps, int forms, int64_t row, const Activations& a) {
  const float inverse = norm ? inverse_rms(x, width, eps) : 1.0f;
  const size_t place = a.place((int)row);
  const int in_block = (int)row % a.block;
  for (int group = 0; group < a.tiles; ++group) {
    f32x16 part[2];
    for (int half = 0; half < 2; ++half) {
      const int at = group * GROUP + half * LANES, left = width - at;
      part[half] = left >= LANES ? load(x + at) : left > 0 ? load_part(x + at, left) : f32x16{};
      if (norm && left > 0) part[half] = part[half] * inverse * (left >= LANES ? load(norm + at) : load_part(norm + at, left));
    }
    if (forms & CODES) quantize_group(part[0], part[1], group, place, in_block, a);
    if (forms & TILES) put_bf16(part[0], part[1], group, row, a);
    if (forms & VALUES) {
      float* values = &a.values[((size_t)row * a.tiles + group) * 32];
      store(values, part[0]);
      store(values + LANES, part[1]);
    }
  }
}

}  // namespace kvant
