// How the attention of a step is cut into pieces that threads take one by one.
//
//     span     one row, up to 256 positions, one kv head           decode, verification; everything in deterministic mode
//     block    32 rows of one sequence, one kv head, on tiles      prompts
//
// Layers of the same group and window share one plan. Rows that have several spans are merged afterwards, by rows.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "attention_tile.h"
#include "program.h"

namespace kvant {

constexpr int MAX_GROUP = 128;  // query heads per kv head

struct SpanItem {
  int32_t row, sequence, from, to, span, num_spans;
};

struct BlockItem {
  int32_t row, sequence, rows;
};

struct AttentionPlan {
  int group = 0, window = 0;
  std::vector<SpanItem> spans;
  std::vector<BlockItem> blocks;
  bool split = false;  // some row has several spans

  // `tile_rows`: sequences of at least so many rows go to tiles; 0: none.
  void build(const Batch& batch, int tile_rows) {
    for (int s = 0; s < batch.sequences; ++s) {
      const int begin = batch.query_start[s], end = batch.query_start[s + 1];
      if (tile_rows && end - begin >= tile_rows && consecutive(batch, begin, end)) {
        for (int t = begin; t < end; t += QUERY_ROWS) blocks.push_back({t, s, std::min(QUERY_ROWS, end - t)});
        continue;
      }
      for (int t = begin; t < end; ++t) add_spans(t, s, (int)batch.positions[t] + 1);
    }
  }

 private:
  static bool consecutive(const Batch& batch, int begin, int end) {
    for (int t = begin + 1; t < end; ++t)
      if (batch.positions[t] != batch.positions[t - 1] + 1) return false;
    return true;
  }

  void add_spans(int row, int sequence, int to) {
    const int from = window > 0 ? std::max(0, to - window) : 0;
    const int first = from / SPAN, count = (to - 1) / SPAN - first + 1;
    for (int i = 0; i < count; ++i)
      spans.push_back({row, sequence, std::max(from, (first + i) * SPAN), std::min(to, (first + i + 1) * SPAN), i, count});
    split |= count > 1;
  }
};

// Results of spans that are still to be merged: values [spans][width], top and total [spans][heads].
struct Partial {
  std::vector<float> values, top, total;
};

// One attention operation of one step.
struct AttentionCall {
  const float* q;
  float* out;
  int64_t q_stride, out_stride;  // floats between rows
  int width;                     // of a row: heads * head_dim
  LayerCache cache;
  const Batch* batch;
  const GroupBatch* group;
  int window;
  float scale, cap;
  Partial* partial;

  int size() const { return cache.head_dim; }
  int heads() const { return width / size() / cache.kv_heads; }  // query heads of one kv head
  const int32_t* table(int sequence) const { return group->block_table + sequence * group->table_width; }
};

// Span `index` of the plan, for the query heads of one kv head.
static inline void run_span(const AttentionCall& call, const SpanItem& item, int index, int kv_head) {
  const int size = call.size(), heads = call.heads(), column = kv_head * heads * size;
  const AttentionRow row = {call.q + item.row * call.q_stride + column, call.table(item.sequence), item.from, item.to, call.scale, call.cap};
  if (item.num_spans > 1) {
    const size_t head = (size_t)index * (call.width / size) + kv_head * heads;
    float* values = call.partial->values.data() + (size_t)index * call.width + column;
    return attend_heads(row, call.cache, kv_head, heads, values, &call.partial->top[head], &call.partial->total[head]);
  }
  float top[MAX_GROUP], total[MAX_GROUP];
  float* out = call.out + item.row * call.out_stride + column;
  attend_heads(row, call.cache, kv_head, heads, out, top, total);
  for (int h = 0; h < heads; ++h)
    for (int c = 0; c < size; ++c) out[h * size + c] /= total[h];
}

// All spans of a row, of which `item` is the first and number `first` of the plan.
static inline void merge_row(const AttentionCall& call, const SpanItem& item, size_t first) {
  const int size = call.size(), heads = call.width / size;
  for (int h = 0; h < heads; ++h)
    merge_spans(&call.partial->values[first * call.width + h * size], &call.partial->top[first * heads + h],
                &call.partial->total[first * heads + h], item.num_spans, call.width, heads, size,
                call.out + item.row * call.out_stride + h * size);
}

#if defined(KVANT_AMX)
static inline void run_block(const AttentionCall& call, const BlockItem& item, int kv_head, TileScratch& scratch) {
  const int column = kv_head * call.heads() * call.size();
  const TileAttention tile = {call.q + item.row * call.q_stride + column,
                              call.q_stride,
                              call.out + item.row * call.out_stride + column,
                              call.out_stride,
                              call.table(item.sequence),
                              (int)call.batch->positions[item.row],
                              item.rows,
                              call.heads(),
                              call.window,
                              call.scale,
                              call.cap};
  attend_tiles(tile, call.cache, kv_head, scratch);
}
#endif

}  // namespace kvant
