// GGML's block formats, decoded group by group: 32 neighbours of one row as small unsigned codes, one scale per 16, and a
// minimum or an offset.
//
//     w[i] = scale[i / 16] * (code[i] - offset) + minimum[i / 16]
//
// IQ4_NL's codes are indices: IQ4_VALUES[code] takes the place of code - offset. Layouts: ggml/src/ggml-common.h of llama.cpp
// (block_q4_0 ... block_q6_K, block_iq4_nl). Plain formats have no codes; `decode_row` serves
// all of them.
#pragma once

#include "simd.h"

namespace kvant {

enum Format {
  F32 = 0, F16 = 1, BF16 = 2, Q4_0 = 3, Q4_1 = 4, Q5_0 = 5, Q8_0 = 6, Q4_K = 7, Q6_K = 8, Q5_1 = 9, Q5_K = 10, Q2_K = 11, Q3_K = 12,
  IQ4_NL = 13
};

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

constexpr int GROUP = 32;

struct Group {
  uint8_t codes[GROUP];
  float scales[2];
  float minima[2];

  void set(float scale, float minimum) {
    scales[0] = scales[1] = scale;
    minima[0] = minima[1] = minimum;
  }
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

static inline void add_fifth_bits(const uint8_t* bytes, uint8_t* codes) {
  uint32_t fifth;
  std::memcpy(&fifth, bytes, 4);
  for (int i = 0; i < GROUP; ++i) codes[i] |= (uint8_t)((fifth >> i & 1) << 4);
}

// Scale and minimum of sub-block j of a Q4_K or Q5_K block: eight pairs of 6-bit numbers in twelve bytes.
static inline void q4_k_scale(const uint8_t* packed, int j, int* scale, int* minimum) {
  if (j < 4) {
    *scale = packed[j] & 63;
    *minimum = packed[j + 4] & 63;
  } else {
    *scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
    *minimum = packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
  }
}

// Q4_K; Q5_K has the fifth bits in between, one bit of 32 bytes per group.
static inline void decode_q4_k(const uint8_t* row, int group, bool fifth, Group* g) {
  const uint8_t* block = row + (int64_t)(group / 8) * (fifth ? 176 : 144);
  const int j = group % 8;
  int scale, minimum;
  q4_k_scale(block + 4, j, &scale, &minimum);
  g->set(read_half(block) * (float)scale, -read_half(block + 2) * (float)minimum);
  const uint8_t* bytes = block + (fifth ? 48 : 16) + 32 * (j / 2);
  for (int i = 0; i < GROUP; ++i) g->codes[i] = j % 2 ? bytes[i] >> 4 : bytes[i] & 15;
  for (int i = 0; fifth && i < GROUP; ++i) g->codes[i] |= (uint8_t)((block[16 + i] >> j & 1) << 4);
}

static inline void decode_q2_k(const uint8_t* row, int group, Group* g) {
  const uint8_t* block = row + (int64_t)(group / 8) * 84;
  const int j = group % 8;
  for (int s = 0; s < 2; ++s) {
    g->scales[s] = read_half(block + 80) * (float)(block[2 * j + s] & 15);
    g->minima[s] = -read_half(block + 82) * (float)(block[2 * j + s] >> 4);
  }
  for (int i = 0; i < GROUP; ++i) g->codes[i] = block[16 + 32 * (j / 4) + i] >> 2 * (j % 4) & 3;
}

// The 6-bit scale of sub-block `i` of a Q3_K block: lower four bits in bytes 0-7, upper two in bytes 8-11.
static inline int q3_k_scale(const uint8_t* packed, int i) {
  const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
  return (low | (packed[8 + i % 4] >> 2 * (i / 4) & 3) << 4) - 32;
}

static inline void decode_q3_k(const uint8_t* row, int group, Group* g) {
  const uint8_t* block = row + (int64_t)(group / 8) * 110;
  const int j = group % 8;
  g->set(0.0f, 0.0f);
  for (int s = 0; s < 2; ++s) g->scales[s] = read_half(block + 108) * (float)q3_k_scale(block + 96, 2 * j + s);
  for (int i = 0; i < GROUP; ++i)
    g->codes[i] = (uint8_t)((block[32 + 32 * (j / 4) + i] >> 2 * (j % 4) & 3) | (block[i] >> j & 1) << 2);
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
  g->set(0.0f, 0.0f);
  g->scales[0] = d * (float)scales[0];
  g->scales[1] = d * (float)scales[1];
}

// What `code` is counted from, for formats without minima.
static inline int code_offset(int format) {
  switch (format) {
    case Q4_0: return 8;
    case Q5_0: return 16;
    case Q8_0: return 128;
    case Q6_K: return 32;
    case Q3_K: return 4;
    default: return 0;
  }
}

// Group number `group` of a row of a block format.
static inline void decode_group(int format, const uint8_t* row, int group, Group* g) {
  switch (format) {
    case Q4_0:
    case IQ4_NL: {
      const uint8_t* block = row + (int64_t)group * 18;
      spread_nibbles(block + 2, g->codes);
      g->set(read_half(block), 0.0f);
      return;
    }
    case Q4_1: {
      const uint8_t* block = row + (int64_t)group * 20;
      spread_nibbles(block + 4, g->codes);
      g->set(read_half(block), read_half(block + 2));
      return;
    }
    case Q5_0: {
      const uint8_t* block = row + (int64_t)group * 22;
      spread_nibbles(block + 6, g->codes);
      add_fifth_bits(block + 2, g->codes);
      g->set(read_half(block), 0.0f);
      return;
    }
    case Q5_1: {
      const uint8_t* block = row + (int64_t)group * 24;
      spread_nibbles(block + 8, g->codes);
      add_fifth_bits(block + 4, g->codes);
      g->set(read_half(block), read_half(block + 2));
      return;
    }
    case Q8_0: {
      const uint8_t* block = row + (int64_t)group * 34;
      for (int i = 0; i < GROUP; ++i) g->codes[i] = block[2 + i] ^ 0x80;
      g->set(read_half(block), 0.0f);
      return;
    }
    case Q2_K: decode_q2_k(row, group, g); return;
    case Q3_K: decode_q3_k(row, group, g); return;
    case Q4_K: decode_q4_k(row, group, false, g); return;
    case Q5_K: decode_q4_k(row, group, true, g); return;
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
  const int offset = code_offset(format);
  Group g;
  for (int group = 0; group < columns / GROUP; ++group) {
    decode_group(format, row, group, &g);
    for (int i = 0; i < GROUP; ++i) {
      const int level = format == IQ4_NL ? IQ4_VALUES[g.codes[i]] : g.codes[i] - offset;
      out[group * GROUP + i] = (g.scales[i / 16] * (float)level + g.minima[i / 16]) * factor;
    }
  }
}

}  // namespace kvant
