// Weights as the kernels want them: panels of 16 rows, cut into tiles of 32 columns.
//
//     panel p = rows 16p ... 16p + 15          a lane of a register is a row
//     tile  t = columns 32t ... 32t + 31       tiles of a panel follow each other, panels follow each other
//
//     tile of codes    [nibbles 256 B, or pairs of bits 128 B][bit planes 64 B each][scales 16 halves, or 2 x 16][minima likewise]
//       quad z (0..7) of a tile: 64 bytes, byte 4 r + j is row r's code of column 4 z + j
//       nibbles: 64-byte line z holds quad z in its low and quad z + 4 in its high nibbles (z = 0..3)
//       pairs of bits: 64-byte line z holds quads z, z + 2, z + 4, z + 6 from its lowest bits up (z = 0, 1)
//       bit plane b: 8 words of 64 bits; bit i of word z is bit 4 + b (2 + b behind pairs) of byte i of quad z
//       8-bit codes: eight lines of bytes instead of nibbles and planes
//     tile of bf16     16 lines; line r holds, row by row, the pair of columns (2 r, 2 r + 1): what an AMX tile reads
//
// The bytes are the file's own, except in super-blocks, whose small integer scales become halves. Bits per weight:
// Q2_K 2.63 -> 4.0, Q3_K 3.44 -> 4.0, Q4_K 4.5 -> 5.0, Q5_K 5.5 -> 6.0, Q6_K 6.56 -> 7.0. F32 and F16 become bf16. Missing rows of
// the last panel are zero.
#pragma once

#include <algorithm>
#include <vector>

#include "acts.h"
#include "pool.h"

namespace kvant {

enum Packing { U4 = 0, U4_MIN = 1, U5 = 2, U8 = 3, U6_HALF = 4, DENSE = 5, U5_MIN = 6, U2_HALF_MIN = 7, U3_HALF = 8, U4_TABLE = 9 };

// What the compiler must know about a packing of codes. Codes of a table are looked up in IQ4_VALUES, moved up by 128.
template <int Bits, int ScalesPerTile, bool HasMinimum, int OffsetLog2, bool Table = false>
struct CodeTile {
  static constexpr int bits = Bits;
  static constexpr bool table = Table;
  static constexpr bool bytewide = Bits == 8 || Table;  // unpacked codes beyond 63
  static constexpr int base = Bits < 4 ? 2 : 4;         // bits that lie side by side; the others are planes
  static constexpr int planes = Bits == 8 ? 0 : Bits - base;
  static constexpr int planes_at = 64 * base;
  static constexpr int scale_rows = ScalesPerTile;
  static constexpr bool has_minimum = HasMinimum;
  static constexpr int offset_log2 = OffsetLog2;  // codes count from 2^this
  static constexpr int code_bytes = Bits == 8 ? 512 : 64 * Bits;
  static constexpr int minimum_at = code_bytes + 32 * ScalesPerTile;
  static constexpr int bytes = minimum_at + (HasMinimum ? 32 * ScalesPerTile : 0);
};

using TileU4 = CodeTile<4, 1, false, 3>;
using TileU4Min = CodeTile<4, 1, true, 0>;
using TileU5 = CodeTile<5, 1, false, 4>;
using TileU8 = CodeTile<8, 1, false, 7>;
using TileU6Half = CodeTile<6, 2, false, 5>;
using TileU5Min = CodeTile<5, 1, true, 0>;
using TileU2HalfMin = CodeTile<2, 2, true, 0>;
using TileU3Half = CodeTile<3, 2, false, 2>;
using TileU4Table = CodeTile<4, 1, false, 7, true>;
constexpr int DENSE_TILE_BYTES = 1024;

static inline int packing_of(int format) {
  switch (format) {
    case Q4_0: return U4;
    case Q4_1:
    case Q4_K: return U4_MIN;
    case Q5_0: return U5;
    case Q8_0: return U8;
    case Q6_K: return U6_HALF;
    case Q5_1:
    case Q5_K: return U5_MIN;
    case Q2_K: return U2_HALF_MIN;
    case Q3_K: return U3_HALF;
    case IQ4_NL: return U4_TABLE;
    default: return DENSE;
  }
}

static inline int tile_bytes(int packing) {
  switch (packing) {
    case U4: return TileU4::bytes;
    case U4_MIN: return TileU4Min::bytes;
    case U5: return TileU5::bytes;
    case U8: return TileU8::bytes;
    case U6_HALF: return TileU6Half::bytes;
    case U5_MIN: return TileU5Min::bytes;
    case U2_HALF_MIN: return TileU2HalfMin::bytes;
    case U3_HALF: return TileU3Half::bytes;
    case U4_TABLE: return TileU4Table::bytes;
    default: return DENSE_TILE_BYTES;
  }
}

static inline int num_panels(int rows) { return (rows + LANES - 1) / LANES; }

// Scales beyond half precision cannot be packed; false says so.
static inline bool put_half(uint8_t* p, float value) {
  const uint16_t h = to_half(value);
  std::memcpy(p, &h, 2);
  return std::fabs(value) <= HALF_MAX;
}

// One row's group into its lane of a tile.
template <class Tile>
static bool pack_group(const Group& g, int lane, uint8_t* tile) {
  for (int z = 0; z < 8; ++z) {
    for (int j = 0; j < 4; ++j) {
      const int byte = 4 * lane + j;
      const uint8_t code = g.codes[4 * z + j];
      if (Tile::bits == 8) {
        tile[64 * z + byte] = code;
        continue;
      }
      constexpr int lines = Tile::base;  // of 64 bytes before the planes
      tile[64 * (z % lines) + byte] |= (uint8_t)((code & ((1 << Tile::base) - 1)) << Tile::base * (z / lines));
      for (int plane = 0; plane < Tile::planes; ++plane)
        tile[Tile::planes_at + 64 * plane + 8 * z + byte / 8] |= (uint8_t)((code >> (Tile::base + plane) & 1) << byte % 8);
    }
  }
  bool fits = true;
  for (int s = 0; s < Tile::scale_rows; ++s) fits &= put_half(tile + Tile::code_bytes + 32 * s + 2 * lane, g.scales[s]);
  for (int s = 0; Tile::has_minimum && s < Tile::scale_rows; ++s)
    fits &= put_half(tile + Tile::minimum_at + 32 * s + 2 * lane, g.minima[s]);
  return fits;
}

struct Source {
  const uint8_t* rows;
  int64_t row_bytes;
  int32_t format, num_rows, num_columns;
};

template <class Tile>
static bool pack_codes(const Source& source, int panel, uint8_t* out) {
  bool fits = true;
  const int tiles = num_tiles(source.num_columns);
  std::memset(out, 0, (size_t)tiles * Tile::bytes);
  Group g;
  for (int lane = 0; lane < LANES; ++lane) {
    const int row = panel * LANES + lane;
    if (row >= source.num_rows) break;
    for (int t = 0; t < tiles; ++t) {
      decode_group(source.format, source.rows + row * source.row_bytes, t, &g);
      fits &= pack_group<Tile>(g, lane, out + (int64_t)t * Tile::bytes);
    }
  }
  return fits;
}

// `count` (up to 32) plain values as bf16, the rest of the 32 as zeros.
static inline void to_bf16_values(int format, const uint8_t* row, int first, int count, uint16_t* out) {
  if (count < GROUP) std::memset(out, 0, GROUP * sizeof *out);
  switch (format) {
    case BF16: std::memcpy(out, row + 2 * first, 2 * (size_t)count); return;
    case F16:
      for (int i = 0; i < count; ++i) out[i] = to_bf16(plain_value(F16, row, first + i));
      return;
    default:
      for (int i = 0; i < count; ++i) out[i] = to_bf16(plain_value(F32, row, first + i));
  }
}

// Tile by tile, so that both its 16 rows and its lines stay in the first-level cache: 1 GB of bf16 takes 0.4 s of one core
// (row by row 3.5 s).
static inline void pack_plain(const Source& source, int panel, uint8_t* out) {
  const int tiles = num_tiles(source.num_columns), first = panel * LANES, rows = std::min(LANES, source.num_rows - first);
  alignas(64) uint32_t pairs[LANES][GROUP / 2] = {};
  for (int t = 0; t < tiles; ++t) {
    const int count = std::min(GROUP, source.num_columns - t * GROUP);
    for (int lane = 0; lane < rows; ++lane)
      to_bf16_values(source.format, source.rows + (first + lane) * source.row_bytes, t * GROUP, count, (uint16_t*)pairs[lane]);
    uint32_t* tile = (uint32_t*)(out + (int64_t)t * DENSE_TILE_BYTES);
    for (int line = 0; line < GROUP / 2; ++line)
      for (int lane = 0; lane < LANES; ++lane) tile[line * LANES + lane] = pairs[lane][line];
  }
}

// Any format by way of its values.
static inline void pack_dense(const Source& source, int panel, uint8_t* out) {
  if (is_plain(source.format)) return pack_plain(source, panel, out);
  const int tiles = num_tiles(source.num_columns);
  std::memset(out, 0, (size_t)tiles * DENSE_TILE_BYTES);
  uint16_t* words = (uint16_t*)out;
  std::vector<float> values(source.num_columns);
  for (int lane = 0; lane < LANES; ++lane) {
    const int row = panel * LANES + lane;
    if (row >= source.num_rows) break;
    decode_row(source.format, source.rows + row * source.row_bytes, source.num_columns, 1.0f, values.data());
    for (int k = 0; k < source.num_columns; ++k) words[k / 2 * 32 + 2 * lane + k % 2] = to_bf16(values[k]);
  }
}

// Packs one panel; false where a scale does not fit (the caller packs DENSE instead).
static inline bool pack_panel(const Source& source, int packing, int panel, uint8_t* out) {
  switch (packing) {
    case U4: return pack_codes<TileU4>(source, panel, out);
    case U4_MIN: return pack_codes<TileU4Min>(source, panel, out);
    case U5: return pack_codes<TileU5>(source, panel, out);
    case U8: return pack_codes<TileU8>(source, panel, out);
    case U6_HALF: return pack_codes<TileU6Half>(source, panel, out);
    case U5_MIN: return pack_codes<TileU5Min>(source, panel, out);
    case U2_HALF_MIN: return pack_codes<TileU2HalfMin>(source, panel, out);
    case U3_HALF: return pack_codes<TileU3Half>(source, panel, out);
    case U4_TABLE: return pack_codes<TileU4Table>(source, panel, out);
    default: pack_dense(source, panel, out); return true;
  }
}

// Many matrices, panel by panel, on all threads of a pool.
struct PackWork {
  const Source* sources;
  const int32_t* packings;
  uint8_t* const* outs;
  uint8_t* fits;
  int count;
};

static inline void pack_panels(const PackWork& w, std::atomic<int64_t>& next) {
  for (;;) {
    int64_t n = next.fetch_add(1);
    int i = 0;
    for (; i < w.count && n >= num_panels(w.sources[i].num_rows); ++i) n -= num_panels(w.sources[i].num_rows);
    if (i == w.count) return;
    const int64_t bytes = (int64_t)num_tiles(w.sources[i].num_columns) * tile_bytes(w.packings[i]);
    if (!pack_panel(w.sources[i], w.packings[i], (int)n, w.outs[i] + n * bytes)) w.fits[i] = 0;
  }
}

static inline int pack_all(const PackWork& work, Pool& pool) {
  std::pair<const PackWork*, std::atomic<int64_t>> shared(&work, 0);
  pool.run(
      [](void* context, int) {
        auto& s = *(std::pair<const PackWork*, std::atomic<int64_t>>*)context;
        pack_panels(*s.first, s.second);
      },
      &shared);
  return 0;
}

}  // namespace kvant
