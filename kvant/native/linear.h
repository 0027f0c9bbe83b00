// A linear: out = act(x W^T + bias) + residual, for few rows or many.
//
// The matrix is a list of units, each a panel of 16 outputs (or a gate's panel with its up's, whose product is the output).
// Threads own contiguous ranges of units of about the same number of bytes: at one row reading them is all there is to do.
#pragma once

#include <algorithm>
#include <vector>

#include "dot.h"
#include "program.h"
#include "rows.h"
#include "tile.h"

namespace kvant {

// One panel of a linear, or a gate's panel with its up's.
struct Unit {
  const uint8_t* data;
  const uint8_t* up;  // null unless gated
  int32_t packing, up_packing;
  int32_t column, count;  // of the output
};

struct Linear {
  std::vector<Unit> units;
  std::vector<int> begin;  // of every thread, and the end
  int columns = 0;         // of the input
  int dot_forms = 0;       // forms of activations the kernels for few rows read
};

// One thread's memory for tiles.
struct LinearScratch {
  Aligned<float> accumulators;  // [CHUNK_ROWS, 32]
  Aligned<uint16_t> widened;    // [columns / 32, 2] tiles
};

// One multiplication: everything its threads must know.
struct Product {
  const Operation* op;
  const Linear* linear;
  const Activations* input;
  int rows;
  float* out;
  int64_t out_stride;
  const float* residual;
  int64_t residual_stride;
};

// Contiguous ranges of units with about the same number of bytes.
static inline void share_out(Linear* linear, int threads) {
  int64_t total = 0, done = 0;
  const auto weight = [](const Unit& u) { return tile_bytes(u.packing) + (u.up ? tile_bytes(u.up_packing) : 0); };
  for (const Unit& u : linear->units) total += weight(u);
  linear->begin.assign(1, 0);
  for (size_t i = 0; i < linear->units.size(); ++i) {
    done += weight(linear->units[i]);
    while ((int)linear->begin.size() < threads && done * threads >= total * (int64_t)linear->begin.size())
      linear->begin.push_back((int)i + 1);
  }
  linear->begin.resize(threads + 1, (int)linear->units.size());
  linear->begin.back() = (int)linear->units.size();
}

// `first`: the operation's first segment.
static inline Linear plan_linear(const Operation& op, const Segment* first, int threads) {
  Linear plan;
  Linear* linear = &plan;
  linear->columns = first->columns;
  int column = 0;
  const bool gated = op.activation >= 0;
  for (int s = 0; s < (gated ? 1 : op.num_segments); ++s) {
    const Segment& segment = first[s];
    const int64_t panel_bytes = (int64_t)num_tiles(segment.columns) * tile_bytes(segment.packing);
    linear->dot_forms |= dot_form(segment.packing);
    for (int p = 0; p < num_panels(segment.rows); ++p) {
      Unit unit = {segment.data + p * panel_bytes, nullptr, segment.packing, 0, column + p * LANES, std::min(LANES, segment.rows - p * LANES)};
      if (gated) {
        unit.up_packing = first[1].packing;
        unit.up = first[1].data + p * (int64_t)num_tiles(first[1].columns) * tile_bytes(first[1].packing);
      }
      linear->units.push_back(unit);
    }
    column += segment.rows;
  }
  if (gated) linear->dot_forms |= dot_form(first[1].packing);
  share_out(linear, threads);
  return plan;
}

// Bias, activation, residual, soft cap; then 16 outputs (or fewer at the edge) of one row go to memory.
static inline void finish(const Product& p, const Unit& unit, int row, f32x16 y, f32x16 up) {
  const Operation& op = *p.op;
  if (op.bias) {
    y += load_part(op.bias + unit.column, unit.count);
    if (unit.up) up += load_part(op.bias + p.linear->units.back().column + p.linear->units.back().count + unit.column, unit.count);
  }
  if (unit.up) y = activate(y, op.activation) * up;
  if (op.cap > 0.0f) y = soft_cap(y, op.cap);
  float* out = p.out + row * p.out_stride + unit.column;
  const float* residual = p.residual ? p.residual + row * p.residual_stride + unit.column : nullptr;
  if (unit.count == LANES) {
    if (residual) y += load(residual);
    store(out, y);
  } else {
    if (residual) y += load_part(residual, unit.count);
    store_part(out, y, unit.count);
  }
}

static inline void multiply_unit(const Product& p, const Unit& unit) {
  alignas(64) float gate[ROW_BLOCK * LANES], up[ROW_BLOCK * LANES];
  for (int row = 0; row < p.rows; row += ROW_BLOCK) {
    const int count = std::min(ROW_BLOCK, p.rows - row);
    dot_kernel(unit.packing, count)(unit.data, *p.input, row, gate);
    if (unit.up) dot_kernel(unit.up_packing, count)(unit.up, *p.input, row, up);
    for (int m = 0; m < count; ++m) finish(p, unit, row + m, load(gate + m * LANES), unit.up ? load(up + m * LANES) : f32x16{});
  }
}

#if defined(KVANT_AMX)

// c [rows, 32]: the sums of rows from `row` on.
static inline void finish_rows(const Product& p, const Unit& first, const Unit* second, int row, int rows, const float* c) {
  const bool plain = !p.op->bias && p.op->cap == 0.0f && first.count == LANES;
  float* out = p.out + row * p.out_stride + first.column;
  if (plain && first.up && !p.residual) {
    const int activation = p.op->activation;
    for (int m = 0; m < rows; ++m, c += BLOCK_OUTPUTS, out += p.out_stride) store(out, activate(load(c), activation) * load(c + LANES));
    return;
  }
  if (plain && second && second->count == LANES && second->column == first.column + LANES) {
    const float* residual = p.residual ? p.residual + row * p.residual_stride + first.column : nullptr;
    for (int m = 0; m < rows; ++m, c += BLOCK_OUTPUTS, out += p.out_stride) {
      f32x16 y = load(c), z = load(c + LANES);
      if (residual) {
        y += load(residual + m * p.residual_stride);
        z += load(residual + m * p.residual_stride + LANES);
      }
      store(out, y);
      store(out + LANES, z);
    }
    return;
  }
  for (int m = 0; m < rows; ++m) {
    const f32x16 y = load(c + m * BLOCK_OUTPUTS), z = load(c + m * BLOCK_OUTPUTS + LANES);
    finish(p, first, row + m, y, z);
    if (second) finish(p, *second, row + m, z, z);
  }
}

static inline void multiply_panels(const Product& p, const Unit& first, const Unit* second, const LinearScratch& s) {
  const int tiles = num_tiles(p.linear->columns), longest = p.rows > BLOCK_ROWS ? STRETCH : SHORT_STRETCH;
  const int stretches = (tiles + longest - 1) / longest;
  const uint8_t* other = first.up ? first.up : second ? second->data : nullptr;
  const int other_packing = first.up ? first.up_packing : second ? second->packing : 0;
  for (int chunk = 0; chunk < p.rows; chunk += CHUNK_ROWS) {
    const int end = std::min(p.rows, chunk + CHUNK_ROWS);
    for (int i = 0; i < stretches; ++i) {
      const int t = tiles * i / stretches, count = tiles * (i + 1) / stretches - t;
      uint16_t* widened = s.widened.data() + (size_t)2 * t * TILE_ELEMENTS;
      if (chunk == 0) widen(first.packing, first.data, t, count, widened, 2 * TILE_ELEMENTS);
      if (chunk == 0 && other) widen(other_packing, other, t, count, widened + TILE_ELEMENTS, 2 * TILE_ELEMENTS);
      for (int row = chunk; row < end; row += BLOCK_ROWS) {
        const uint16_t* a0 = p.input->bf16 + ((size_t)row / 16 * tiles + t) * TILE_ELEMENTS;
        const uint16_t* a1 = row + 16 < end ? a0 + (size_t)tiles * TILE_ELEMENTS : nullptr;
        multiply_block(a0, a1, widened, count, s.accumulators.data() + (size_t)(row - chunk) * BLOCK_OUTPUTS, i == 0);
      }
    }
    finish_rows(p, first, second, chunk, end - chunk, s.accumulators.data());
  }
}

// Two panels at a time (gate and up of the same outputs where gated), all rows.
static inline void multiply_tiles(const Product& p, int begin, int end, const LinearScratch& scratch) {
  const int step = p.linear->units.front().up ? 1 : 2;
  for (int u = begin; u < end; u += step) {
    const Unit& first = p.linear->units[u];
    multiply_panels(p, first, !first.up && u + 1 < end ? &p.linear->units[u + 1] : nullptr, scratch);
  }
}

#endif

// This thread's share of the product.
static inline void multiply(const Product& p, int id, bool tiles, const LinearScratch& scratch) {
  const int begin = p.linear->begin[id], end = p.linear->begin[id + 1];
#if defined(KVANT_AMX)
  if (tiles) return multiply_tiles(p, begin, end, scratch);
#endif
  (void)tiles, (void)scratch;
  for (int u = begin; u < end; ++u) multiply_unit(p, p.linear->units[u]);
}

}  // namespace kvant
