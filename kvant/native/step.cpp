// The executor: runs a program on a batch, in one call. See program.py for what a program is.
//
// Every operation is split over the threads either by rows of the batch or by columns of the weights. Threads meet at a barrier
// between operations, except between two that are split by rows alike: then a thread reads only what it wrote itself.
//
//     by rows      embedding, norms, rotary, cache write, gated, add, scale; and the first half of a linear, which
//                  normalises and quantises its input
//     by columns   the second half of a linear: panels of 16 outputs, shared out by bytes
//     by spans     attention: (sequence, kv head, 256 positions), taken from a common counter, the largest first
//
// With one row in the batch, quantising it once per thread is cheaper than a barrier.
#include <algorithm>
#include <memory>

#include "attention.h"
#include "attention_tile.h"
#include "dot.h"
#include "pool.h"
#include "program.h"
#include "tile.h"

namespace kvant {

enum Status { OK = 0, NO_MEMORY = -1, BAD_ID = -2, BAD_SLOT = -3, BAD_BLOCK = -4, BAD_LENGTH = -5, BAD_ROW = -6, BAD_POSITION = -7, BAD_COPY = -8 };

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

// A piece of attention that one thread does: one row and span, one kv head.
struct SpanItem {
  int32_t row, sequence, from, to, span, num_spans;
};

// Up to 32 rows of one sequence, for tiles.
struct BlockItem {
  int32_t row, sequence, rows;
};

struct GroupPlan {
  std::vector<SpanItem> spans;
  std::vector<BlockItem> blocks;
  int window = 0;
  bool split = false;  // some row has several spans
};

struct Partial {
  std::vector<float> values, top, total;
};

struct Scratch {
  ActivationMemory activations;   // a single row, prepared by this thread for itself
  Aligned<float> accumulators;    // [CHUNK_ROWS, 32]
  Aligned<uint16_t> widened;      // [columns / 32, 2] tiles
#if defined(KVANT_AMX)
  TileScratch attention;
#endif
};

class Executor {
 public:
  Executor(const Operation* ops, int num_ops, const View* views, int num_views, const Segment* segments, int num_segments,
           const CacheGroup* groups, int num_groups, const Frequencies* frequencies, int num_frequencies, int64_t row_floats,
           int vocabulary_rows, int threads, int deterministic)
      : ops_(ops, ops + num_ops), views_(views, views + num_views), segments_(segments, segments + num_segments),
        groups_(groups, groups + num_groups), frequencies_(frequencies, frequencies + num_frequencies), row_floats_(row_floats),
        vocabulary_(vocabulary_rows), deterministic_(deterministic != 0), pool_(threads), scratch_(threads) {
    linears_.resize(ops_.size());
    counters_ = std::vector<std::atomic<int>>(ops_.size());
    for (size_t i = 0; i < ops_.size(); ++i)
      if (ops_[i].kind == LINEAR) plan_linear(ops_[i], &linears_[i]);
    for (auto& f : frequencies_) angle_floats_ += 2 * f.count;
#if defined(KVANT_AMX)
    tiles_ = !deterministic_ && request_tiles();
#endif
  }

  bool tiles() const { return tiles_; }
  float* hidden() const { return hidden_; }
  int64_t hidden_stride() const { return hidden_stride_; }

  // Runs every operation but the last (the head), then the head where logits are wanted.
  int run(const Batch& batch) {
    const int status = check(batch);
    if (status != OK) return status;
    batch_ = batch;
    group_batches_.assign(batch.groups, batch.groups + groups_.size());
    batch_.groups = group_batches_.data();
    reserve(batch.tokens, batch.logit_count);
    plan_attention();
    body_ = true;
    return launch();
  }

  // The head alone, on rows of the last run's hidden states.
  int head(const int64_t* rows, int count, float* logits) {
    for (int i = 0; i < count; ++i)
      if (rows[i] < 0 || rows[i] >= batch_.tokens) return BAD_ROW;
    batch_.logit_rows = rows;
    batch_.logit_count = count;
    batch_.logits = logits;
    reserve_activations(linears_.back(), count);
    body_ = false;
    return launch();
  }

 private:
  // --- before a step ----------------------------------------------------------------------------------------------------

  int check(const Batch& b) const {
    for (int t = 0; t < b.tokens; ++t) {
      if (b.ids[t] < 0 || b.ids[t] >= vocabulary_) return BAD_ID;
      if (b.positions[t] < 0) return BAD_POSITION;
    }
    for (int i = 0; i < b.logit_count; ++i)
      if (b.logit_rows[i] < 0 || b.logit_rows[i] >= b.tokens) return BAD_ROW;
    if (b.query_start[0] != 0 || b.query_start[b.sequences] != b.tokens) return BAD_LENGTH;
    for (size_t g = 0; g < groups_.size(); ++g) {
      const int status = check_group(b, b.groups[g], groups_[g].block_size);
      if (status != OK) return status;
    }
    return OK;
  }

  static int check_group(const Batch& b, const GroupBatch& g, int block_size) {
    for (int t = 0; t < b.tokens; ++t)
      if (g.slots[t] < 0 || g.slots[t] >= g.num_blocks * block_size) return BAD_SLOT;
    for (int s = 0; s < b.sequences; ++s) {
      if (b.query_start[s + 1] < b.query_start[s]) return BAD_LENGTH;
      const int64_t blocks = ((int64_t)g.kv_lens[s] + block_size - 1) / block_size;
      if (g.kv_lens[s] < 0 || blocks > g.table_width) return BAD_LENGTH;
      for (int64_t i = 0; i < blocks; ++i) {
        const int32_t block = g.block_table[s * g.table_width + i];
        if (block < 0 || block >= g.num_blocks) return BAD_BLOCK;
      }
      for (int t = b.query_start[s]; t < b.query_start[s + 1]; ++t)
        if (b.positions[t] >= g.kv_lens[s]) return BAD_POSITION;
    }
    for (int64_t c = 0; c < 2 * g.num_copies; ++c)
      if (g.copies[c] < 0 || g.copies[c] >= g.num_blocks) return BAD_COPY;
    return OK;
  }

  void plan_linear(const Operation& op, Linear* linear) {
    const Segment* first = &segments_[op.first_segment];
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
    share_out(linear);
  }

  // Contiguous ranges of units with about the same number of bytes.
  void share_out(Linear* linear) {
    int64_t total = 0, done = 0;
    const auto weight = [](const Unit& u) { return tile_bytes(u.packing) + (u.up ? tile_bytes(u.up_packing) : 0); };
    for (const Unit& u : linear->units) total += weight(u);
    linear->begin.assign(1, 0);
    for (size_t i = 0; i < linear->units.size(); ++i) {
      done += weight(linear->units[i]);
      while ((int)linear->begin.size() < pool_.size() && done * pool_.size() >= total * (int64_t)linear->begin.size())
        linear->begin.push_back((int)i + 1);
    }
    linear->begin.resize(pool_.size() + 1, (int)linear->units.size());
    linear->begin.back() = (int)linear->units.size();
  }

  bool use_tiles(int rows) const { return tiles_ && rows >= TILE_ROWS; }

  int forms(const Linear& linear, int rows) const { return use_tiles(rows) ? (int)TILES : linear.dot_forms; }

  void reserve_activations(const Linear& linear, int rows) {
    shared_.reserve(rows, linear.columns, forms(linear, rows));
    if (rows == 1)
      for (auto& s : scratch_) s.activations.reserve(1, linear.columns, linear.dot_forms);
#if defined(KVANT_AMX)
    if (use_tiles(rows))
      for (auto& s : scratch_) {
        s.accumulators.reserve(CHUNK_ROWS * BLOCK_OUTPUTS);
        s.widened.reserve((size_t)2 * num_tiles(linear.columns) * TILE_ELEMENTS);
      }
#endif
  }

  void reserve(int tokens, int logit_rows) {
    capacity_ = tokens;
    arena_.reserve((size_t)row_floats_ * capacity_);
    angles_.reserve((size_t)std::max(1, angle_floats_) * capacity_);
    for (size_t i = 0; i + 1 < ops_.size(); ++i)
      if (ops_[i].kind == LINEAR) reserve_activations(linears_[i], tokens);
    if (logit_rows) reserve_activations(linears_.back(), logit_rows);
    const View& last = views_[ops_.back().in0];
    hidden_ = at(ops_.back().in0, 0);
    hidden_stride_ = last.stride;
  }

  void plan_attention() {
    plans_.assign(ops_.size(), -1);
    group_plans_.clear();
    int largest = 0;
    for (size_t i = 0; i < ops_.size(); ++i) {
      if (ops_[i].kind != ATTENTION) continue;
      plans_[i] = find_plan(ops_[i]);
      largest = std::max(largest, views_[ops_[i].in0].width);
    }
    size_t most = 0;
    for (auto& plan : group_plans_) most = std::max(most, plan.second.spans.size());
    bool split = false;
    for (auto& plan : group_plans_) split |= plan.second.split;
    if (!split) return;
    partial_.values.resize(most * largest);
    partial_.top.resize(most * largest);
    partial_.total.resize(most * largest);
  }

  // Layers of the same group and window share one plan.
  int find_plan(const Operation& op) {
    for (size_t i = 0; i < group_plans_.size(); ++i)
      if (group_plans_[i].first == op.group && group_plans_[i].second.window == op.window) return (int)i;
    group_plans_.emplace_back(op.group, GroupPlan());
    GroupPlan& plan = group_plans_.back().second;
    plan.window = op.window;
    const CacheGroup& group = groups_[op.group];
    for (int s = 0; s < batch_.sequences; ++s) {
      const int begin = batch_.query_start[s], end = batch_.query_start[s + 1];
      if (tiles_ && end - begin >= TILE_ROWS && group.head_dim % 32 == 0) add_blocks(begin, end, s, op, &plan);
      else
        for (int t = begin; t < end; ++t) add_spans(t, s, &plan);
    }
    return (int)group_plans_.size() - 1;
  }

  void add_blocks(int begin, int end, int sequence, const Operation& op, GroupPlan* plan) {
#if defined(KVANT_AMX)
    for (int t = begin; t < end; t += QUERY_ROWS) plan->blocks.push_back({t, sequence, std::min(QUERY_ROWS, end - t)});
    const int heads = views_[op.in0].width / op.head_dim / groups_[op.group].kv_heads;
    for (auto& s : scratch_) s.attention.reserve(heads, op.head_dim);
#else
    (void)begin, (void)end, (void)sequence, (void)op, (void)plan;
#endif
  }

  void add_spans(int row, int sequence, GroupPlan* plan) const {
    const int to = (int)batch_.positions[row] + 1, from = plan->window > 0 ? std::max(0, to - plan->window) : 0;
    const int first = from / SPAN, count = (to - 1) / SPAN - first + 1;
    for (int i = 0; i < count; ++i)
      plan->spans.push_back({row, sequence, std::max(from, (first + i) * SPAN), std::min(to, (first + i + 1) * SPAN), i, count});
    plan->split |= count > 1;
  }

  // --- running ----------------------------------------------------------------------------------------------------------

  int launch() {
    for (auto& counter : counters_) counter.store(0, std::memory_order_relaxed);
    pool_.run([](void* self, int id) { ((Executor*)self)->work(id); }, this);
    return OK;
  }

  enum Split { BY_ROWS, OTHERWISE };

  void work(int id) {
#if defined(KVANT_AMX)
    if (tiles_) configure_tiles();
#endif
    Split before = OTHERWISE;
    if (body_) {
      if (copy_blocks(id)) pool_.barrier();
      const auto [from, to] = rows_of(id, batch_.tokens);
      for (int t = from; t < to; ++t) angles(t);
      for (int i = 0; i < (int)ops_.size() - 1; ++i) before = operation(i, id, before);
    }
    if (batch_.logit_count && batch_.logits) {
      pool_.barrier();
      head_product(id);
    }
#if defined(KVANT_AMX)
    if (tiles_) release_tiles();
#endif
  }

  Split operation(int i, int id, Split before) {
    const Operation& op = ops_[i];
    if (op.kind == LINEAR) return linear(i, id, before);
    if (op.kind == ATTENTION) return attention(i, id);
    if (before != BY_ROWS) pool_.barrier();
    const auto [from, to] = rows_of(id, batch_.tokens);
    for (int t = from; t < to; ++t) row_operation(op, t);
    return BY_ROWS;
  }

  std::pair<int, int> rows_of(int id, int rows) const {
    return {(int)((int64_t)rows * id / pool_.size()), (int)((int64_t)rows * (id + 1) / pool_.size())};
  }

  float* at(int view, int row) const {
    const View& v = views_[view];
    return arena_.data() + v.offset * capacity_ + (int64_t)row * v.stride + v.start;
  }

  void row_operation(const Operation& op, int t) {
    float* out = op.out >= 0 ? at(op.out, t) : nullptr;
    const float* a = op.in0 >= 0 ? at(op.in0, t) : nullptr;
    const float* b = op.in1 >= 0 ? at(op.in1, t) : nullptr;
    const int width = op.in0 >= 0 ? views_[op.in0].width : 0;
    switch (op.kind) {
      case EMBEDDING:
        decode_row(op.format, op.table + batch_.ids[t] * op.row_bytes, views_[op.out].width, op.scale, out);
        return;
      case NORM: return norm_row(a, width, op.norm, op.eps, b, out);
      case HEAD_NORM:
        for (int h = 0; h < width; h += op.head_dim) norm_row(a + h, op.head_dim, op.norm, op.eps, nullptr, out + h);
        return;
      case ROTARY:
        return rotary_row(a, width / op.head_dim, op.head_dim, angles_at(op.angles, t), frequencies_[op.angles].count, out);
      case STORE_KV: return store_kv_row(layer_cache(op), batch_.groups[op.group].slots[t], a, b);
      case GATED: return gated_row(a, width / 2, op.activation, out);
      case ADD:
        for (int c = 0; c < width; ++c) out[c] = a[c] + b[c];
        return;
      default:
        for (int c = 0; c < width; ++c) out[c] = a[c] * op.scale;
    }
  }

  float* angles_at(int table, int row) const {
    float* p = angles_.data() + (int64_t)row * angle_floats_;
    for (int i = 0; i < table; ++i) p += 2 * frequencies_[i].count;
    return p;
  }

  void angles(int t) {
    for (size_t i = 0; i < frequencies_.size(); ++i) angles_row(frequencies_[i], batch_.positions[t], angles_at((int)i, t));
  }

  LayerCache layer_cache(const Operation& op) const {
    const CacheGroup& g = groups_[op.group];
    const int64_t layer = batch_.groups[op.group].num_blocks * g.block_size * 2 * g.kv_heads * g.head_dim;
    return {batch_.groups[op.group].cache + op.layer * layer, g.kv_heads, g.head_dim, g.block_size};
  }

  // Copy-on-write and the like: whole blocks, in every layer, before anything is written.
  bool copy_blocks(int id) {
    bool any = false;
    for (size_t g = 0; g < groups_.size(); ++g) {
      const GroupBatch& b = batch_.groups[g];
      const CacheGroup& group = groups_[g];
      const int64_t block = (int64_t)group.block_size * 2 * group.kv_heads * group.head_dim;
      any |= b.num_copies > 0;
      for (int layer = id; layer < group.layers; layer += pool_.size())
        for (int64_t c = 0; c < b.num_copies; ++c) {
          uint16_t* base = b.cache + layer * b.num_blocks * block;
          std::memcpy(base + b.copies[2 * c + 1] * block, base + b.copies[2 * c] * block, block * 2);
        }
    }
    return any;
  }

  // --- linear -----------------------------------------------------------------------------------------------------------

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

  Split linear(int i, int id, Split before) {
    const Operation& op = ops_[i];
    const Linear& l = linears_[i];
    const int rows = batch_.tokens, form = forms(l, rows);
    const bool own = rows == 1 && before != BY_ROWS;  // every thread prepares the row for itself
    const Activations a = (own ? scratch_[id].activations : shared_).view(l.columns);
    if (before != BY_ROWS) pool_.barrier();
    const auto [from, to] = own ? std::make_pair(0, 1) : rows_of(id, rows);
    for (int t = from; t < to; ++t) prepare_row(at(op.in0, t), l.columns, op.norm, op.eps, form, t, a);
    if (!own) pool_.barrier();
    const View& out = views_[op.out];
    Product p = {&op, &l, &a, rows, at(op.out, 0), out.stride, nullptr, 0};
    if (op.in1 >= 0) {
      p.residual = at(op.in1, 0);
      p.residual_stride = views_[op.in1].stride;
    }
    multiply(p, id);
    return OTHERWISE;
  }

  void head_product(int id) {
    const Operation& op = ops_.back();
    const Linear& l = linears_.back();
    const int rows = batch_.logit_count;
    const Activations a = shared_.view(l.columns);
    const auto [from, to] = rows_of(id, rows);
    for (int r = from; r < to; ++r)
      prepare_row(at(op.in0, (int)batch_.logit_rows[r]), l.columns, op.norm, op.eps, forms(l, rows), r, a);
    pool_.barrier();
    const int64_t width = l.units.back().column + l.units.back().count;
    multiply({&op, &l, &a, rows, batch_.logits, width, nullptr, 0}, id);
  }

  void multiply(const Product& p, int id) {
    const int begin = p.linear->begin[id], end = p.linear->begin[id + 1];
#if defined(KVANT_AMX)
    if (use_tiles(p.rows)) return multiply_tiles(p, id, begin, end);
#endif
    for (int u = begin; u < end; ++u) multiply_unit(p, p.linear->units[u]);
  }

  void multiply_unit(const Product& p, const Unit& unit) {
    alignas(64) float gate[ROW_BLOCK * LANES], up[ROW_BLOCK * LANES];
    for (int row = 0; row < p.rows; row += ROW_BLOCK) {
      const int count = std::min(ROW_BLOCK, p.rows - row);
      dot_kernel(unit.packing, count)(unit.data, *p.input, row, gate);
      if (unit.up) dot_kernel(unit.up_packing, count)(unit.up, *p.input, row, up);
      for (int m = 0; m < count; ++m) finish(p, unit, row + m, load(gate + m * LANES), unit.up ? load(up + m * LANES) : f32x16{});
    }
  }

  // Bias, activation, residual, soft cap; then 16 outputs (or fewer at the edge) of one row go to memory.
  static void finish(const Product& p, const Unit& unit, int row, f32x16 y, f32x16 up) {
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

#if defined(KVANT_AMX)
  // Two panels at a time (gate and up of the same outputs where gated), all rows.
  void multiply_tiles(const Product& p, int id, int begin, int end) {
    const int step = p.linear->units.front().up ? 1 : 2;
    for (int u = begin; u < end; u += step) {
      const Unit& first = p.linear->units[u];
      multiply_panels(p, first, !first.up && u + 1 < end ? &p.linear->units[u + 1] : nullptr, scratch_[id]);
    }
  }

  void multiply_panels(const Product& p, const Unit& first, const Unit* second, const Scratch& s) {
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

  // c [rows, 32]: the sums of rows from `row` on.
  static void finish_rows(const Product& p, const Unit& first, const Unit* second, int row, int rows, const float* c) {
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
#endif

  // --- attention --------------------------------------------------------------------------------------------------------

  Split attention(int i, int id) {
    const Operation& op = ops_[i];
    const GroupPlan& plan = group_plans_[plans_[i]].second;
    pool_.barrier();
    const int kv_heads = groups_[op.group].kv_heads, blocks = (int)plan.blocks.size(), spans = (int)plan.spans.size();
    // Neighbouring heads lie side by side in the cache: with enough spans for everybody, one thread takes them all.
    const int heads = spans >= 4 * pool_.size() ? kv_heads : 1;
    const int block_units = blocks * kv_heads, total = block_units + spans * kv_heads / heads;
    for (int n; (n = counters_[i].fetch_add(1, std::memory_order_relaxed)) < total;) {
      if (n < block_units) {
        block(op, plan.blocks[blocks - 1 - n / kv_heads], n % kv_heads, id);  // late rows see most: first
        continue;
      }
      const int first = (n - block_units) * heads;
      for (int h = first; h < first + heads; ++h) span(op, plan.spans[h / kv_heads], h / kv_heads, h % kv_heads);
    }
    if (!plan.split) return OTHERWISE;
    pool_.barrier();
    const auto [from, to] = rows_of(id, batch_.tokens);
    for (size_t s = 0; s < plan.spans.size(); ++s) {
      const SpanItem& item = plan.spans[s];
      if (item.span == 0 && item.row >= from && item.row < to) merge(op, item, s);
    }
    return BY_ROWS;
  }

  void block(const Operation& op, const BlockItem& item, int kv_head, int id) {
#if defined(KVANT_AMX)
    const LayerCache cache = layer_cache(op);
    const int heads = views_[op.in0].width / op.head_dim / cache.kv_heads, column = kv_head * heads * op.head_dim;
    const GroupBatch& g = batch_.groups[op.group];
    const TileAttention tile = {at(op.in0, item.row) + column, views_[op.in0].stride, at(op.out, item.row) + column, views_[op.out].stride,
                                g.block_table + item.sequence * g.table_width, (int)batch_.positions[item.row], item.rows, heads,
                                op.window, op.scale, op.cap};
    attend_tiles(tile, cache, kv_head, scratch_[id].attention);
#else
    (void)op, (void)item, (void)kv_head, (void)id;
#endif
  }

  void span(const Operation& op, const SpanItem& item, int index, int kv_head) {
    const LayerCache cache = layer_cache(op);
    const int size = op.head_dim, width = views_[op.in0].width, heads = width / size / cache.kv_heads;
    const GroupBatch& g = batch_.groups[op.group];
    const AttentionRow row = {at(op.in0, item.row) + kv_head * heads * size, g.block_table + item.sequence * g.table_width,
                              item.from, item.to, op.scale, op.cap};
    if (item.num_spans > 1) {
      float* values = partial_.values.data() + ((size_t)index * width + kv_head * heads * size);
      const size_t at_heads = (size_t)index * (width / size) + kv_head * heads;
      return attend_heads(row, cache, kv_head, heads, values, &partial_.top[at_heads], &partial_.total[at_heads]);
    }
    float top[MAX_GROUP], total[MAX_GROUP];
    float* out = at(op.out, item.row) + kv_head * heads * size;
    attend_heads(row, cache, kv_head, heads, out, top, total);
    for (int h = 0; h < heads; ++h)
      for (int c = 0; c < size; ++c) out[h * size + c] /= total[h];
  }

  void merge(const Operation& op, const SpanItem& item, size_t first) {
    if (item.num_spans == 1) return;
    const int size = op.head_dim, width = views_[op.in0].width, heads = width / size;
    for (int h = 0; h < heads; ++h)
      merge_spans(&partial_.values[first * width + h * size], &partial_.top[first * heads + h], &partial_.total[first * heads + h],
                  item.num_spans, width, heads, size, at(op.out, item.row) + h * size);
  }

  static constexpr int TILE_ROWS = 16;   // from here on tiles beat integer products
  static constexpr int MAX_GROUP = 128;  // query heads per kv head

  std::vector<Operation> ops_;
  std::vector<View> views_;
  std::vector<Segment> segments_;
  std::vector<CacheGroup> groups_;
  std::vector<Frequencies> frequencies_;
  std::vector<Linear> linears_;
  int64_t row_floats_;
  int64_t vocabulary_;
  bool deterministic_, tiles_ = false, body_ = true;
  int angle_floats_ = 0;
  Pool pool_;
  std::vector<Scratch> scratch_;
  std::vector<std::atomic<int>> counters_;
  Aligned<float> arena_, angles_;
  ActivationMemory shared_;
  Partial partial_;
  std::vector<std::pair<int, GroupPlan>> group_plans_;
  std::vector<int> plans_;
  std::vector<GroupBatch> group_batches_;
  Batch batch_ = {};
  int64_t capacity_ = 0, hidden_stride_ = 0;
  float* hidden_ = nullptr;
};

}  // namespace kvant

// --- what Python calls --------------------------------------------------------------------------------------------------

using kvant::Executor;

extern "C" {

int kvant_tiles_granted() {
#if defined(KVANT_AMX)
  return kvant::request_tiles();
#else
  return 0;
#endif
}

int kvant_has_tiles(const Executor* e) { return e->tiles(); }

// 2: AVX-512 VNNI, 1: AVX2, 0: portable.
int kvant_vector_level() {
#if defined(KVANT_AVX512)
  return 2;
#elif defined(KVANT_AVX2)
  return 1;
#else
  return 0;
#endif
}

int kvant_packing_of(int format) { return kvant::packing_of(format); }

int64_t kvant_packed_bytes(int packing, int rows, int columns) {
  return (int64_t)kvant::num_panels(rows) * kvant::num_tiles(columns) * kvant::tile_bytes(packing);
}

// Packs `count` matrices with `threads` threads. fits[i] = 0 where a scale of matrix i is beyond half precision.
int kvant_pack(const kvant::Source* sources, const int32_t* packings, uint8_t* const* outs, uint8_t* fits, int count, int threads) {
  struct Work {
    const kvant::Source* sources;
    const int32_t* packings;
    uint8_t* const* outs;
    uint8_t* fits;
    int count;
    std::atomic<int64_t> next{0};
  } work;
  work.sources = sources;
  work.packings = packings;
  work.outs = outs;
  work.fits = fits;
  work.count = count;
  try {
    kvant::Pool pool(threads);
    pool.run(
        [](void* context, int) {
          Work& w = *(Work*)context;
          for (int64_t n; (n = w.next.fetch_add(1)) >= 0;) {
            int i = 0;
            for (; i < w.count && n >= kvant::num_panels(w.sources[i].num_rows); ++i) n -= kvant::num_panels(w.sources[i].num_rows);
            if (i == w.count) return;
            const kvant::Source& source = w.sources[i];
            const int64_t bytes = (int64_t)kvant::num_tiles(source.num_columns) * kvant::tile_bytes(w.packings[i]);
            if (!kvant::pack_panel(source, w.packings[i], (int)n, w.outs[i] + n * bytes)) w.fits[i] = 0;
          }
        },
        &work);
  } catch (const std::exception&) {
    return kvant::NO_MEMORY;
  }
  return kvant::OK;
}

void kvant_decode_row(int format, const uint8_t* row, int columns, float* out) { kvant::decode_row(format, row, columns, 1.0f, out); }

Executor* kvant_create(const kvant::Operation* ops, int num_ops, const kvant::View* views, int num_views, const kvant::Segment* segments,
                       int num_segments, const kvant::CacheGroup* groups, int num_groups, const kvant::Frequencies* frequencies,
                       int num_frequencies, int64_t row_floats, int vocabulary, int threads, int deterministic) {
  try {
    return new Executor(ops, num_ops, views, num_views, segments, num_segments, groups, num_groups, frequencies, num_frequencies,
                        row_floats, vocabulary, threads, deterministic);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void kvant_destroy(Executor* e) { delete e; }

int kvant_run(Executor* e, const kvant::Batch* batch) {
  try {
    return e->run(*batch);
  } catch (const std::exception&) {
    return kvant::NO_MEMORY;
  }
}

int kvant_head(Executor* e, const int64_t* rows, int count, float* logits) {
  try {
    return e->head(rows, count, logits);
  } catch (const std::exception&) {
    return kvant::NO_MEMORY;
  }
}

// The last run's final hidden states: row t at kvant_hidden(e) + t * kvant_hidden_stride(e).
const float* kvant_hidden(const Executor* e) { return e->hidden(); }
int64_t kvant_hidden_stride(const Executor* e) { return e->hidden_stride(); }

}  // extern "C"
