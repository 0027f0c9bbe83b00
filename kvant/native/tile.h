// Many rows: AMX tiles of bf16. Weights stay packed; each 32 columns of a panel are widened to bf16 just before they are used.
//
//     C [16 rows x 16 outputs] += A [16 rows x 32 columns] * B [32 columns x 16 outputs]        one tile operation
//
// Two by two tiles are computed together (32 rows x 32 outputs), so that every loaded tile is used twice. Everything is cut so
// that what is used again stays in the first-level cache:
//
//     for 32 outputs:                                   (a thread's share)
//       for 128 rows:                                   sums in scratch memory, 16 KiB
//         for a stretch of 288 columns:                 weights widened when first met: 18 KiB of bf16
//           for 32 rows:  2 x 2 tiles over the stretch
//
// Measured per tile operation (the unit alone takes 4.6 ns), 512 rows, 1536 columns: sums in the output's own rows 12-14 ns,
// in scratch memory 8.8 ns; software prefetch of A makes it worse.
//
// Hazards. (1) gcc 12 declares only the first bytes of the tile configuration as read, and none of what a tile load reads:
// without `fence_memory` the stores before it are optimised away. (2) The kernel must be asked for permission once per
// process, and every thread configures its own tiles.
#pragma once

#include "dot.h"

#if defined(KVANT_AMX)
#include <sys/syscall.h>
#include <unistd.h>

namespace kvant {

constexpr int TILE_ELEMENTS = 512;   // bf16 values of a 1 KiB tile
constexpr int STRETCH = 9;           // tiles of 32 columns, at most
constexpr int SHORT_STRETCH = 6;     // with at most 32 rows: widened weights are used once, soon after
constexpr int CHUNK_ROWS = 128;
constexpr int BLOCK_ROWS = 32;
constexpr int BLOCK_OUTPUTS = 32;

static inline void fence_memory() { __asm__ volatile("" : : : "memory"); }

static inline bool request_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// All eight tiles as 16 rows of 64 bytes.
static inline void configure_tiles() {
  alignas(64) struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

static inline void release_tiles() { _tile_release(); }

// One tile of codes as bf16 pairs, in the order an AMX tile reads.
//
// A code byte is permuted straight into the mantissa of 0.5 (or of 32768.0 for 8-bit codes), which makes the float
// 0.5 + code / 256 (32768 + code); scale and offset are folded into one multiply-add. Lanes hold (row, column pair): eight rows
// per register, and the narrowing instruction joins two registers to one line of sixteen pairs.
template <class Tile>
static inline void widen_tile(const uint8_t* tile, uint16_t* out) {
  __m512i quads[8];
  unpack<Tile>(tile, quads);
  constexpr int byte = Tile::bytewide ? 1 : 2;  // where the code goes inside the 32-bit lane
  const __m512i one = _mm512_set1_epi32(Tile::bytewide ? 0x47000000 : 0x3f000000);
  const __m512 unit = _mm512_set1_ps(Tile::bytewide ? 1.0f : 256.0f);
  const __m512 bias = _mm512_set1_ps((Tile::bytewide ? 32768.0f : 128.0f) + (Tile::has_minimum ? 0.0f : (float)(1 << Tile::offset_log2)));
  const __m512i first_rows = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512i last_rows = _mm512_add_epi32(first_rows, _mm512_set1_epi32(8));
  // Byte 4 * row + column for columns 0 and 1 in turn; +2 gives columns 2 and 3, +32 the last eight rows.
  const __m512i lanes = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29);
  const __m512i pick = _mm512_slli_epi32(lanes, 8 * byte);
  const __mmask64 into = byte == 1 ? 0x2222222222222222ull : 0x4444444444444444ull;
  const __m512i step2 = _mm512_set1_epi32(2 << 8 * byte), step32 = _mm512_set1_epi32(32 << 8 * byte);
  const __m512i picks[4] = {pick, _mm512_add_epi32(pick, step32), _mm512_add_epi32(pick, step2),
                            _mm512_add_epi32(_mm512_add_epi32(pick, step2), step32)};
  for (int s = 0; s < Tile::scale_rows; ++s) {
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(tile + Tile::code_bytes) + s));
    __m512 start = _mm512_setzero_ps();
    if (Tile::has_minimum) start = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(tile + Tile::minimum_at) + s));
    start = _mm512_fnmadd_ps(bias, scale, start);
    const __m512 step = _mm512_mul_ps(scale, unit);
    const __m512 steps[2] = {_mm512_permutexvar_ps(first_rows, step), _mm512_permutexvar_ps(last_rows, step)};
    const __m512 starts[2] = {_mm512_permutexvar_ps(first_rows, start), _mm512_permutexvar_ps(last_rows, start)};
    constexpr int QUADS = 8 / Tile::scale_rows;
    for (int z = s * QUADS; z < (s + 1) * QUADS; ++z) {
      for (int pair = 0; pair < 2; ++pair) {
        const __m512 low = _mm512_castsi512_ps(_mm512_mask_permutexvar_epi8(one, into, picks[2 * pair], quads[z]));
        const __m512 high = _mm512_castsi512_ps(_mm512_mask_permutexvar_epi8(one, into, picks[2 * pair + 1], quads[z]));
        const __m512bh line = _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(high, steps[1], starts[1]), _mm512_fmadd_ps(low, steps[0], starts[0]));
        _mm512_store_si512(out + 32 * (2 * z + pair), (__m512i)line);
      }
    }
  }
}

template <class Tile>
static void widen_codes(const uint8_t* panel, int first, int count, uint16_t* out, int stride) {
  for (int t = 0; t < count; ++t) {
    const uint8_t* tile = panel + (int64_t)(first + t) * Tile::bytes;
    for (int line = 0; line < Tile::bytes; line += 64) prefetch(tile + PREFETCH_AHEAD + line);
    widen_tile<Tile>(tile, out + (int64_t)t * stride);
  }
}

// Tiles [first, first + count) of a panel as bf16, `stride` elements apart.
static inline void widen(int packing, const uint8_t* panel, int first, int count, uint16_t* out, int stride) {
  switch (packing) {
    case U4: return widen_codes<TileU4>(panel, first, count, out, stride);
    case U4_MIN: return widen_codes<TileU4Min>(panel, first, count, out, stride);
    case U5: return widen_codes<TileU5>(panel, first, count, out, stride);
    case U8: return widen_codes<TileU8>(panel, first, count, out, stride);
    case U6_HALF: return widen_codes<TileU6Half>(panel, first, count, out, stride);
    case U5_MIN: return widen_codes<TileU5Min>(panel, first, count, out, stride);
    case U2_HALF_MIN: return widen_codes<TileU2HalfMin>(panel, first, count, out, stride);
    case U3_HALF: return widen_codes<TileU3Half>(panel, first, count, out, stride);
    case U4_TABLE: return widen_codes<TileU4Table>(panel, first, count, out, stride);
    default:
      for (int t = 0; t < count; ++t)
        std::memcpy(out + (int64_t)t * stride, panel + (int64_t)(first + t) * DENSE_TILE_BYTES, DENSE_TILE_BYTES);
  }
}

// c [32, 32] (+)= a [32, 32 steps] * b [32 steps, 32]: a0 and a1 (null: 16 rows only) are rows of tiles; b alternates between
// its two panels.
static inline void multiply_block(const uint16_t* a0, const uint16_t* a1, const uint16_t* b, int steps, float* c, bool fresh) {
  constexpr int C_STRIDE = BLOCK_OUTPUTS * sizeof(float);
  fence_memory();
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, c, C_STRIDE);
    _tile_loadd(1, c + 16, C_STRIDE);
    _tile_loadd(2, c + 16 * BLOCK_OUTPUTS, C_STRIDE);
    _tile_loadd(3, c + 16 * BLOCK_OUTPUTS + 16, C_STRIDE);
  }
  for (int t = 0; t < steps; ++t) {
    _tile_loadd(4, a0 + t * TILE_ELEMENTS, 64);
    _tile_loadd(6, b + 2 * t * TILE_ELEMENTS, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + (2 * t + 1) * TILE_ELEMENTS, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (!a1) continue;
    _tile_loadd(5, a1 + t * TILE_ELEMENTS, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, C_STRIDE);
  _tile_stored(1, c + 16, C_STRIDE);
  if (a1) {
    _tile_stored(2, c + 16 * BLOCK_OUTPUTS, C_STRIDE);
    _tile_stored(3, c + 16 * BLOCK_OUTPUTS + 16, C_STRIDE);
  }
  fence_memory();
}

}  // namespace kvant
#endif
