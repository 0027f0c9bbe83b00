// GGML's block formats, decoded group by group: 32 neighbours of one row as small unsigned codes, one scale per 16, and a
// minimum or an offset.
//
//     w[i] = scale[i / 16] * (code[i] - offset) + minimum
//
// Layouts: ggml/src/ggml-common.h of llama.cpp (block_q4_0 ... block_q6_K). Plain formats have no codes; `decode_row` serves
// all of them.
#pragma once

#include "simd.h"

namespace kvant {

enum Format { F32 = 0, F16 = 1, BF16 = 2, Q4_0 = 3, Q4_1 = 4, Q5_0 = 5, Q8_0 = 6, Q4_K = 7, Q6_K = 8 };

constexpr int GROUP = 32;

struct Group {
  uint8_t codes[GROUP];
  float scales[2];
  float minimum;
};

static inline uint16_t read_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

static inline float read_half(const uint8_t* p) { return from_half(read_u16(p)); }

static inline void spread_nibbles(const uint8_t* bytes, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = bytes[i] & 15;
    codes[i + 16] = bytes[i] >> 4;
  }
}

// Scale and minimum of sub-block j of a Q4_K block: eight pairs of 6-bit numbers in twelve bytes.
static inline void q4_k_scale(const uint8_t* packed, int j, int* scale, int* minimum) {
  if (j < 4) {
    *scale = packed[j] & 63;
    *minimum = packed[j + 4] & 63;
  } else {
    *scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
    *minimum = packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
  }
}

static inline void decode_q4_k(const uint8_t* row, int group, Group* g) {
  const uint8_t* block = row + (int64_t)(group / 8) * 144;
  const int j = group % 8;
  int scale, minimum;
  q4_k_scale(block + 4, j, &scale, &minimum);
  g->scales[0] = g->scales[1] = read_half(block) * (float)scale;
  g->minimum = -read_half(block + 2) * (float)minimum;
  const uint8_t* bytes = block + 16 + 32 * (j / 2);
  for (int i = 0; i < GROUP; ++i) g->codes[i] = j % 2 ? bytes[i] >> 4 : bytes[i] & 15;
}

static inline void decode_q6_k(const uint8_t* row, int group, Group* g) {
  const uint8_t* block = row + (int64_t)(group / 8) * 210;
  const int half = group % 8 / 4, quarter = group % 4;
  const uint8_t* low = block + 64 * half + 32 * (quarter % 2);
  const uint8_t* high = block + 128 + 32 * half;
  const int8_t* scales = (const int8_t*)(block + 192) + 8 * half + 2 * quarter;
  const float d = read_half(block + 208);
  for (int i = 0; i < GROUP; ++i) {
    const int nibble = quarter < 2 ? low[i] & 15 : low[i] >> 4;
    g->codes[i] = (uint8_t)(nibble | (high[i] >> 2 * quarter & 3) << 4);
  }
  g->scales[0] = d * (float)scales[0];
  g->scales[1] = d * (float)scales[1];
  g->minimum = 0.0f;
}

// What `code` is counted from, for formats without minima.
static inline int code_offset(int format) {
  switch (format) {
    case Q4_0: return 8;
    case Q5_0: return 16;
    case Q8_0: return 128;
    case Q6_K: return 32;
    default: return 0;
  }
}

// Group number `group` of a row of a block format.
static inline void decode_group(int format, const uint8_t* row, int group, Group* g) {
  switch (format) {
    case Q4_0: {
      const uint8_t* block = row + (int64_t)group * 18;
      spread_nibbles(block + 2, g->codes);
      g->scales[0] = g->scales[1] = read_half(block);
      g->minimum = 0.0f;
      return;
    }
    case Q4_1: {
      const uint8_t* block = row + (int64_t)group * 20;
      spread_nibbles(block + 4, g->codes);
      g->scales[0] = g->scales[1] = read_half(block);
      g->minimum = read_half(block + 2);
      return;
    }
    case Q5_0: {
      const uint8_t* block = row + (int64_t)group * 22;
      uint32_t fifth;
      std::memcpy(&fifth, block + 2, 4);
      spread_nibbles(block + 6, g->codes);
      for (int i = 0; i < GROUP; ++i) g->codes[i] |= (uint8_t)((fifth >> i & 1) << 4);
      g->scales[0] = g->scales[1] = read_half(block);
      g->minimum = 0.0f;
      return;
    }
    case Q8_0: {
      const uint8_t* block = row + (int64_t)group * 34;
      for (int i = 0; i < GROUP; ++i) g->codes[i] = block[2 + i] ^ 0x80;
      g->scales[0] = g->scales[1] = read_half(block);
      g->minimum = 0.0f;
      return;
    }
    case Q4_K: decode_q4_k(row, group, g); return;
    default: decode_q6_k(row, group, g); return;
  }
}

static inline bool is_plain(int format) { return format <= BF16; }

static inline float plain_value(int format, const uint8_t* row, int64_t column) {
  float v;
  switch (format) {
    case F32: std::memcpy(&v, row + 4 * column, 4); return v;
    case F16: return read_half(row + 2 * column);
    default: return from_bf16(read_u16(row + 2 * column));
  }
}

// A whole row as fp32, times `factor`.
static inline void decode_row(int format, const uint8_t* row, int columns, float factor, float* out) {
  if (is_plain(format)) {
    for (int i = 0; i < columns; ++i) out[i] = plain_value(format, row, i) * factor;
    return;
  }
  const float offset = (float)code_offset(format);
  Group g;
  for (int group = 0; group < columns / GROUP; ++group) {
    decode_group(format, row, group, &g);
    for (int i = 0; i < GROUP; ++i)
      out[group * GROUP + i] = (g.scales[i / 16] * ((float)g.codes[i] - offset) + g.minimum) * factor;
  }
}

}  // namespace kvant
