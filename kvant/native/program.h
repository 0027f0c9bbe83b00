// What the executor is told: the same structures stand, field by field, in abi.py.
#pragma once

#include <cstdint>

namespace kvant {

enum Kind { EMBEDDING, NORM, HEAD_NORM, ROTARY, STORE_KV, ATTENTION, LINEAR, GATED, ADD, SCALE };
enum Activation { SILU = 0, GELU_TANH = 1, GELU = 2 };

// Columns [start, start + width) of a value: row t is at arena + offset * capacity + t * stride + start.
struct View {
  int64_t offset;  // floats per row of all slots before this one
  int32_t stride, start, width, padding;
};

// A packed matrix [rows, columns]; see pack.h.
struct Segment {
  const uint8_t* data;
  int32_t rows, columns, packing, padding;
};

struct Operation {
  const float* norm;      // [width], or null
  const float* bias;      // [sum of rows], or null
  const uint8_t* table;   // EMBEDDING: rows of the file; ROTARY: frequencies fp32 [size / 2]
  int64_t row_bytes;      // EMBEDDING
  int32_t kind;
  int32_t in0, in1, out;  // views; -1: none
  int32_t first_segment, num_segments;
  int32_t format, num_rows;   // EMBEDDING
  int32_t group, layer;       // cache group, and the layer's place inside it
  int32_t head_dim, window;   // window 0: everything
  int32_t activation, angles; // LINEAR, GATED: -1 none; ROTARY: which table of cosines
  float eps, scale, cap, padding;
};

// One group's cache: [layers][blocks][kv_heads][keys head_dim x 16 | values 16 x head_dim] halves, per 16 positions.
struct CacheGroup {
  int32_t layers, kv_heads, head_dim, block_size;
};

struct Frequencies {
  const float* inverse;  // [count]
  int32_t count;
  float scale;
};

struct GroupBatch {
  uint16_t* cache;
  int64_t num_blocks;
  const int64_t* slots;        // [T]
  const int32_t* block_table;  // [S, width]
  const int32_t* kv_lens;      // [S]
  const int64_t* copies;       // [C, 2]
  int64_t num_copies;
  int64_t table_width;
};

struct Batch {
  const int64_t* ids;          // [T]
  const int64_t* positions;    // [T]
  const int32_t* query_start;  // [S + 1]
  const int64_t* logit_rows;   // [R]
  const GroupBatch* groups;
  float* logits;               // [R, vocabulary], or null: no head in this call
  int64_t* best;               // [R] place of the largest of the first `drawable` logits, the lowest of equals; or null
  uint8_t* finite;             // [R] whether those hold neither NaN nor infinity
  int32_t tokens, sequences, logit_count, drawable;
};

}  // namespace kvant
