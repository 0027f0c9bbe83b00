// Few rows: one panel of weights (16 outputs) times up to ROW_BLOCK rows of activations.
//
// Integer codes meet integer codes: per tile of 32 columns an exact 32-bit sum, then one fp32 multiply-add per lane,
//
//     out[lane] += scale_w[lane] * scale_a * sum_i (c_w[i] - o) c_a[i]  +  minimum_w[lane] * (scale_a * sum_i c_a[i])
//
// in the order of the tiles, whatever the number of rows: a row's result does not depend on its company. The weights are
// unpacked once per block of rows. Bodies of the same arithmetic: AVX-512 VNNI, AVX2 with VNNI and without, plain C++.
#pragma once

#include "pack.h"

namespace kvant {

// Bytes between the line in use and the line asked for: 1.2-2x at one row, where reading the weights is all there is.
constexpr int PREFETCH_AHEAD = 4096;

// The part of the prepared activations that one kernel call reads: up to ROW_BLOCK rows of `tiles` tiles.
struct Block {
  int tiles, rows;
  const int8_t* codes;   // [tiles, rows, 32]
  const float* scales;   // [tiles, rows]
  const float* sums;     // the same
  const int32_t* minus;  // the same, or [tiles, 2, rows] for two scales per tile
};

// The block that begins with row `row`.
static inline Block block_of(const Activations& a, int row, int scale_rows) {
  const size_t at = (size_t)row * a.tiles;
  return {a.tiles, a.block, a.codes + at * 32, a.scales + at, a.sums + at, scale_rows == 2 ? a.minus16 + 2 * at : a.minus32 + at};
}

// scale * sum of the codes that meet minimum `s` of a tile.
template <class Tile>
static inline float sum_of(const Block& b, int m, int tile, int s) {
  const size_t at = (size_t)tile * b.rows;
  return Tile::scale_rows == 2 ? b.scales[at + m] * -(float)b.minus[2 * at + s * b.rows + m] : b.sums[at + m];
}

typedef void (*DotKernel)(const uint8_t* panel, const Activations& a, int row, float* out);

#if defined(KVANT_AVX512)

template <class Tile>
static inline void unpack(const uint8_t* tile, __m512i* quads) {
  if (Tile::bits == 8) {
    for (int z = 0; z < 8; ++z) quads[z] = _mm512_loadu_si512(tile + 64 * z);
    return;
  }
  const __m512i low = _mm512_set1_epi8((1 << Tile::base) - 1);
  for (int z = 0; z < Tile::base; ++z) {
    const __m512i line = _mm512_loadu_si512(tile + 64 * z);
    for (int part = 0; part < 8 / Tile::base; ++part)
      quads[z + part * Tile::base] = _mm512_and_si512(_mm512_srli_epi16(line, part * Tile::base), low);
  }
  if (Tile::table) {
    const __m128i values = _mm_xor_si128(_mm_loadu_si128((const __m128i*)IQ4_VALUES), _mm_set1_epi8((char)0x80));
    for (int z = 0; z < 8; ++z) quads[z] = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), quads[z]);
  }
  for (int plane = 0; plane < Tile::planes; ++plane) {
    const __m512i bit = _mm512_set1_epi8((char)(1 << (Tile::base + plane)));
    for (int z = 0; z < 8; ++z) {
      uint64_t word;
      std::memcpy(&word, tile + Tile::planes_at + 64 * plane + 8 * z, 8);
      quads[z] = _mm512_mask_add_epi8(quads[z], _cvtu64_mask64(word), quads[z], bit);
    }
  }
}

static inline __m512i broadcast4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

// Loops over rows and quads are unrolled by force: gcc leaves the accumulators in memory otherwise, which takes 1.7x as long.
#define KVANT_UNROLL _Pragma("GCC unroll 8")

template <class Tile, int Rows>
static void dot_codes(const uint8_t* panel, const Activations& a, int row, float* out) {
  const Block b = block_of(a, row, Tile::scale_rows);
  constexpr int QUADS = 8 / Tile::scale_rows;
  __m512 acc[Rows];
  KVANT_UNROLL for (int m = 0; m < Rows; ++m) acc[m] = _mm512_setzero_ps();
  for (int t = 0; t < b.tiles; ++t) {
    const uint8_t* tile = panel + (int64_t)t * Tile::bytes;
    const int8_t* codes = b.codes + (size_t)t * b.rows * 32;
    const float* scales = b.scales + (size_t)t * b.rows;
    const int32_t* minus = b.minus + (size_t)t * b.rows * Tile::scale_rows;
    for (int line = 0; line < Tile::bytes; line += 64) prefetch(tile + PREFETCH_AHEAD + line);
    __m512i quads[8];
    unpack<Tile>(tile, quads);
    for (int s = 0; s < Tile::scale_rows; ++s) {
      const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(tile + Tile::code_bytes) + s));
      __m512i dot[Rows];
      KVANT_UNROLL for (int m = 0; m < Rows; ++m)
        dot[m] = Tile::has_minimum ? _mm512_setzero_si512() : _mm512_set1_epi32(minus[s * b.rows + m] << Tile::offset_log2);
      KVANT_UNROLL for (int z = 0; z < QUADS; ++z)
        KVANT_UNROLL for (int m = 0; m < Rows; ++m)
          dot[m] = _mm512_dpbusd_epi32(dot[m], quads[s * QUADS + z], broadcast4(codes + 32 * m + 16 * s + 4 * z));
      KVANT_UNROLL for (int m = 0; m < Rows; ++m)
        acc[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[m]), _mm512_mul_ps(scale, _mm512_set1_ps(scales[m])), acc[m]);
    }
    for (int s = 0; Tile::has_minimum && s < Tile::scale_rows; ++s) {
      const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(tile + Tile::minimum_at) + s));
      KVANT_UNROLL for (int m = 0; m < Rows; ++m) acc[m] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sum_of<Tile>(b, m, t, s)), acc[m]);
    }
  }
  KVANT_UNROLL for (int m = 0; m < Rows; ++m) _mm512_storeu_ps(out + m * LANES, acc[m]);
}

template <int Rows>
static void dot_dense(const uint8_t* panel, const Activations& a, int row, float* out) {
  const int pairs = a.tiles * 16;
  const float* values = a.values + (size_t)row * a.tiles * 32;
  const __m512i high_half = _mm512_set1_epi32((int)0xffff0000u);
  __m512 even[Rows], odd[Rows];
  KVANT_UNROLL for (int m = 0; m < Rows; ++m) even[m] = odd[m] = _mm512_setzero_ps();
  for (int r = 0; r < pairs; ++r) {
    const uint8_t* line = panel + (int64_t)r * 64;
    prefetch(line + PREFETCH_AHEAD);
    const __m512i both = _mm512_loadu_si512(line);
    const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(both, high_half));
    KVANT_UNROLL for (int m = 0; m < Rows; ++m) {
      const float* x = values + (size_t)m * a.tiles * 32 + 2 * r;
      even[m] = _mm512_fmadd_ps(first, _mm512_set1_ps(x[0]), even[m]);
      odd[m] = _mm512_fmadd_ps(second, _mm512_set1_ps(x[1]), odd[m]);
    }
  }
  KVANT_UNROLL for (int m = 0; m < Rows; ++m) _mm512_storeu_ps(out + m * LANES, _mm512_add_ps(even[m], odd[m]));
}

#else

// The tile's codes as bytes in the order of the quads: byte 64 z + 4 r + j is row r's code of column 4 z + j.
template <class Tile>
static inline void unpack(const uint8_t* tile, uint8_t* quads) {
  if (Tile::bits == 8) {
    std::memcpy(quads, tile, 512);
    return;
  }
  constexpr int line = Tile::planes_at;
  for (int i = 0; i < line; ++i)
    for (int part = 0; part < 8 / Tile::base; ++part) quads[i + part * line] = tile[i] >> part * Tile::base & ((1 << Tile::base) - 1);
  for (int i = 0; Tile::table && i < 512; ++i) quads[i] = (uint8_t)(IQ4_VALUES[quads[i]] + 128);
  for (int plane = 0; plane < Tile::planes; ++plane) {
    const uint8_t* bits = tile + line + 64 * plane;
    for (int i = 0; i < 512; ++i) quads[i] += (uint8_t)((bits[i / 8] >> i % 8 & 1) << (Tile::base + plane));
  }
}

// dot[lane] += sum over `count` quads of code * activation, the codes counted from their offset. Exact.
template <class Tile>
static inline void dot_quads(const uint8_t* quads, const int8_t* codes, int count, int minus, int32_t* dot) {
#if defined(KVANT_AVXVNNI)
  __m256i acc[2];
  acc[0] = acc[1] = _mm256_set1_epi32(Tile::has_minimum ? 0 : minus * (1 << Tile::offset_log2));
  for (int z = 0; z < count; ++z) {
    int32_t four;
    std::memcpy(&four, codes + 4 * z, 4);
    const __m256i x = _mm256_set1_epi32(four);
    for (int half = 0; half < 2; ++half)
      acc[half] = _mm256_dpbusd_avx_epi32(acc[half], _mm256_loadu_si256((const __m256i*)(quads + 64 * z) + half), x);
  }
  std::memcpy(dot, acc, 64);
#elif defined(KVANT_AVX2)
  __m256i acc[2];
  const __m256i ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8((char)0x80);
  const int start = Tile::has_minimum || Tile::bytewide ? 0 : minus * (1 << Tile::offset_log2);
  acc[0] = acc[1] = _mm256_set1_epi32(start);
  for (int z = 0; z < count; ++z) {
    int32_t four;
    std::memcpy(&four, codes + 4 * z, 4);
    const __m256i x = _mm256_set1_epi32(four);
    for (int half = 0; half < 2; ++half) {
      __m256i w = _mm256_loadu_si256((const __m256i*)(quads + 64 * z) + half);
      __m256i y = x;
      if (Tile::bytewide) {  // 255 * 127 * 2 would saturate 16 bits: |w| * (x with w's sign) does not
        w = _mm256_xor_si256(w, flip);
        y = _mm256_sign_epi8(x, w);
        w = _mm256_abs_epi8(w);
      }
      acc[half] = _mm256_add_epi32(acc[half], _mm256_madd_epi16(_mm256_maddubs_epi16(w, y), ones));
    }
  }
  std::memcpy(dot, acc, 64);
#else
  const int start = Tile::has_minimum ? 0 : minus * (1 << Tile::offset_log2);
  for (int lane = 0; lane < LANES; ++lane) {
    int total = start;
    for (int z = 0; z < count; ++z)
      for (int j = 0; j < 4; ++j) total += (int)quads[64 * z + 4 * lane + j] * (int)codes[4 * z + j];
    dot[lane] = total;
  }
#endif
}

template <class Tile, int Rows>
static void dot_codes(const uint8_t* panel, const Activations& a, int row, float* out) {
  const Block b = block_of(a, row, Tile::scale_rows);
  constexpr int QUADS = 8 / Tile::scale_rows;
  f32x16 acc[Rows] = {};
  for (int t = 0; t < b.tiles; ++t) {
    const uint8_t* tile = panel + (int64_t)t * Tile::bytes;
    prefetch(tile + PREFETCH_AHEAD);
    uint8_t quads[512];
    unpack<Tile>(tile, quads);
    for (int s = 0; s < Tile::scale_rows; ++s) {
      const f32x16 scale = from_half((const uint16_t*)(tile + Tile::code_bytes) + LANES * s);
      for (int m = 0; m < Rows; ++m) {
        const size_t at = (size_t)t * b.rows + m;
        const int minus = b.minus[((size_t)t * Tile::scale_rows + s) * b.rows + m];
        i32x16 dot;
        dot_quads<Tile>(quads + 64 * QUADS * s, &b.codes[at * 32 + 16 * s], QUADS, minus, (int32_t*)&dot);
        acc[m] += __builtin_convertvector(dot, f32x16) * (scale * b.scales[at]);
      }
    }
    for (int s = 0; Tile::has_minimum && s < Tile::scale_rows; ++s) {
      const f32x16 minimum = from_half((const uint16_t*)(tile + Tile::minimum_at) + LANES * s);
      for (int m = 0; m < Rows; ++m) acc[m] += minimum * sum_of<Tile>(b, m, t, s);
    }
  }
  for (int m = 0; m < Rows; ++m) store(out + m * LANES, acc[m]);
}

template <int Rows>
static void dot_dense(const uint8_t* panel, const Activations& a, int row, float* out) {
  f32x16 even[Rows] = {}, odd[Rows] = {};
  for (int r = 0; r < a.tiles * 16; ++r) {
    u32x16 both;
    std::memcpy(&both, panel + (int64_t)r * 64, 64);
    const f32x16 first = bits_to_float(both << 16), second = bits_to_float(both & 0xffff0000u);
    for (int m = 0; m < Rows; ++m) {
      const float* x = &a.values[(size_t)(row + m) * a.tiles * 32 + 2 * r];
      even[m] += first * x[0];
      odd[m] += second * x[1];
    }
  }
  for (int m = 0; m < Rows; ++m) store(out + m * LANES, even[m] + odd[m]);
}

#endif

// The kernel for `rows` rows, 1 <= rows <= ROW_BLOCK.
template <template <int> class Kernel, int Rows = ROW_BLOCK>
static inline DotKernel of_rows(int rows) {
  if constexpr (Rows == 1) return Kernel<1>::run;
  else return rows == Rows ? (DotKernel)Kernel<Rows>::run : of_rows<Kernel, Rows - 1>(rows);
}

template <class Tile>
struct CodeKernel {
  template <int Rows>
  struct Of {
    static constexpr DotKernel run = dot_codes<Tile, Rows>;
  };
};

template <int Rows>
struct DenseKernel {
  static constexpr DotKernel run = dot_dense<Rows>;
};

static inline DotKernel dot_kernel(int packing, int rows) {
  switch (packing) {
    case U4: return of_rows<CodeKernel<TileU4>::Of>(rows);
    case U4_MIN: return of_rows<CodeKernel<TileU4Min>::Of>(rows);
    case U5: return of_rows<CodeKernel<TileU5>::Of>(rows);
    case U8: return of_rows<CodeKernel<TileU8>::Of>(rows);
    case U6_HALF: return of_rows<CodeKernel<TileU6Half>::Of>(rows);
    case U5_MIN: return of_rows<CodeKernel<TileU5Min>::Of>(rows);
    case U2_HALF_MIN: return of_rows<CodeKernel<TileU2HalfMin>::Of>(rows);
    case U3_HALF: return of_rows<CodeKernel<TileU3Half>::Of>(rows);
    case U4_TABLE: return of_rows<CodeKernel<TileU4Table>::Of>(rows);
    default: return of_rows<DenseKernel>(rows);
  }
}

// What form of activations a packing's kernel for few rows reads.
static inline int dot_form(int packing) { return packing == DENSE ? VALUES : CODES; }

}  // namespace kvant
