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
// Few rows are quantised by every thread for itself: cheaper than a barrier, and than writing side by side into the same cache
// lines (8 rows of SmolLM2: 0.45 ms of a step instead of 1.1 ms).
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>
#include <vector>

#include "attention_work.h"
#include "check.h"
#include "linear.h"
#include "pool.h"
#include "rows.h"
#include "select.h"

namespace kvant {

// What one thread needs for itself.
struct Scratch {
  ActivationMemory activations;  // of few rows
  LinearScratch linear;
#if defined(KVANT_AMX)
  TileScratch attention;
#endif
};

// A program as it came from Python; copied, except what it points to.
struct Description {
  std::vector<Operation> operations;  // the head last
  std::vector<View> views;
  std::vector<Segment> segments;
  std::vector<CacheGroup> groups;
  std::vector<Frequencies> frequencies;
  int64_t row_floats;   // of all values together, per row
  int64_t vocabulary;   // rows of the smallest embedding
};

class Executor {
 public:
  Executor(Description program, int threads, bool deterministic)
      : ops_(std::move(program.operations)), views_(std::move(program.views)), groups_(std::move(program.groups)),
        frequencies_(std::move(program.frequencies)), row_floats_(program.row_floats), vocabulary_(program.vocabulary),
        linears_(ops_.size()), pool_(threads), scratch_(threads), counters_(ops_.size()) {
    for (size_t i = 0; i < ops_.size(); ++i)
      if (ops_[i].kind == LINEAR) linears_[i] = plan_linear(ops_[i], &program.segments[ops_[i].first_segment], pool_.size());
    for (const Frequencies& f : frequencies_) angle_floats_ += 2 * f.count;
#if defined(KVANT_AMX)
    tiles_ = !deterministic && request_tiles();
#else
    (void)deterministic;
#endif
  }

  bool tiles() const { return tiles_; }
  const float* hidden() const { return at(ops_.back().in0, 0); }
  int64_t hidden_stride() const { return views_[ops_.back().in0].stride; }
  Pool& pool() { return pool_; }

  // From now on the time of every operation is added to its entry of `times` [operations, the head last]: what passes on the
  // first thread, waiting for the others included. Null: no more.
  void profile(int64_t* times) { times_ = times; }

  // Runs every operation but the last (the head), then the head where logits are wanted.
  int run(const Batch& batch) {
    const int status = check_batch(batch, groups_, vocabulary_);
    if (status != OK) return status;
    group_batches_.assign(batch.groups, batch.groups + groups_.size());
    batch_ = batch;
    batch_.groups = group_batches_.data();
    reserve();
    plan_attention();
    scans_.resize((size_t)batch_.logit_count * pool_.size());
    const int result = launch(true);
    if (batch_.best) join_scans();
    return result;
  }

  // The head alone, on rows of the last run's hidden states.
  int head(const int64_t* rows, int count, float* logits) {
    for (int i = 0; i < count; ++i)
      if (rows[i] < 0 || rows[i] >= batch_.tokens) return BAD_ROW;
    batch_.logit_rows = rows;
    batch_.logit_count = count;
    batch_.logits = logits;
    batch_.best = nullptr;
    reserve_linear(linears_.back(), count);
    return launch(false);
  }

 private:
  // --- before a step ----------------------------------------------------------------------------------------------------

  bool use_tiles(int rows) const { return tiles_ && rows >= TILE_ROWS; }

  // Whether every thread prepares all rows of a linear for itself.
  bool prepares_alone(int rows) const { return rows <= ROW_BLOCK && !use_tiles(rows); }

  int forms(const Linear& linear, int rows) const { return use_tiles(rows) ? (int)TILES : linear.dot_forms; }

  void reserve() {
    capacity_ = batch_.tokens;
    arena_.reserve((size_t)row_floats_ * capacity_);
    angles_.reserve((size_t)std::max(1, angle_floats_) * capacity_);
    for (size_t i = 0; i + 1 < ops_.size(); ++i)
      if (ops_[i].kind == LINEAR) reserve_linear(linears_[i], batch_.tokens);
    if (batch_.logit_count) reserve_linear(linears_.back(), batch_.logit_count);
  }

  void reserve_linear(const Linear& linear, int rows) {
    shared_.reserve(rows, linear.columns, forms(linear, rows));
    for (Scratch& s : scratch_) {
      if (prepares_alone(rows)) s.activations.reserve(rows, linear.columns, linear.dot_forms);
#if defined(KVANT_AMX)
      if (!use_tiles(rows)) continue;
      s.linear.accumulators.reserve(CHUNK_ROWS * BLOCK_OUTPUTS);
      s.linear.widened.reserve((size_t)2 * num_tiles(linear.columns) * TILE_ELEMENTS);
#endif
    }
  }

  void plan_attention() {
    plan_of_.assign(ops_.size(), -1);
    plans_.clear();
    for (size_t i = 0; i < ops_.size(); ++i)
      if (ops_[i].kind == ATTENTION) plan_of_[i] = plan(ops_[i]);
    size_t floats = 0;
    for (size_t i = 0; i < ops_.size(); ++i)
      if (plan_of_[i] >= 0 && plans_[plan_of_[i]].split)
        floats = std::max(floats, plans_[plan_of_[i]].spans.size() * views_[ops_[i].in0].width);
    if (partial_.values.size() >= floats) return;
    partial_.values.resize(floats);
    partial_.top.resize(floats);
    partial_.total.resize(floats);
  }

  int plan(const Operation& op) {
    for (size_t i = 0; i < plans_.size(); ++i)
      if (plans_[i].group == op.group && plans_[i].window == op.window) return (int)i;
    plans_.emplace_back();
    AttentionPlan& plan = plans_.back();
    plan.group = op.group;
    plan.window = op.window;
    plan.build(batch_, tiles_ && op.head_dim % 32 == 0 ? TILE_ROWS : 0);
#if defined(KVANT_AMX)
    const int heads = views_[op.in0].width / op.head_dim / groups_[op.group].kv_heads;
    if (!plan.blocks.empty())
      for (Scratch& s : scratch_) s.attention.reserve(heads, op.head_dim);
#endif
    return (int)plans_.size() - 1;
  }

  // --- running ----------------------------------------------------------------------------------------------------------

  int launch(bool body) {
    body_ = body;
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
      int64_t since = times_ && id == 0 ? nanoseconds() : 0;
      for (int i = 0; i < (int)ops_.size() - 1; ++i) {
        before = operation(i, id, before);
        if (times_ && id == 0) since = count_time(i, since);
      }
    }
    if (batch_.logit_count && batch_.logits) {
      pool_.barrier();
      const int64_t since = times_ && id == 0 ? nanoseconds() : 0;
      head_product(id);
      if (times_ && id == 0) count_time((int)ops_.size() - 1, since);
    }
#if defined(KVANT_AMX)
    if (tiles_) release_tiles();
#endif
  }

  static int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  // Adds what passed since `since` to operation i; returns the time now.
  int64_t count_time(int i, int64_t since) {
    const int64_t now = nanoseconds();
    times_[i] += now - since;
    return now;
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

  Split linear(int i, int id, Split before) {
    const Operation& op = ops_[i];
    const Linear& l = linears_[i];
    const int rows = batch_.tokens, form = forms(l, rows);
    const bool alone = prepares_alone(rows);
    const Activations a = (alone ? scratch_[id].activations : shared_).view(rows, l.columns);
    if (alone || before != BY_ROWS) pool_.barrier();
    const auto [from, to] = alone ? std::make_pair(0, rows) : rows_of(id, rows);
    for (int t = from; t < to; ++t) prepare_row(at(op.in0, t), l.columns, op.norm, op.eps, form, t, a);
    if (!alone) pool_.barrier();
    const View& out = views_[op.out];
    Product p = {&op, &l, &a, rows, at(op.out, 0), out.stride, nullptr, 0};
    if (op.in1 >= 0) {
      p.residual = at(op.in1, 0);
      p.residual_stride = views_[op.in1].stride;
    }
    multiply(p, id, use_tiles(rows), scratch_[id].linear);
    return OTHERWISE;
  }

  void head_product(int id) {
    const Operation& op = ops_.back();
    const Linear& l = linears_.back();
    const int rows = batch_.logit_count;
    const bool alone = prepares_alone(rows);
    const Activations a = (alone ? scratch_[id].activations : shared_).view(rows, l.columns);
    const auto [from, to] = alone ? std::make_pair(0, rows) : rows_of(id, rows);
    for (int r = from; r < to; ++r)
      prepare_row(at(op.in0, (int)batch_.logit_rows[r]), l.columns, op.norm, op.eps, forms(l, rows), r, a);
    if (!alone) pool_.barrier();
    const int64_t width = l.units.back().column + l.units.back().count;
    multiply({&op, &l, &a, rows, batch_.logits, width, nullptr, 0}, id, use_tiles(rows), scratch_[id].linear);
    if (batch_.best) scan_share(l, width, id);
  }

  // The largest of the logits that this thread has just written, while they are still in its cache.
  void scan_share(const Linear& l, int64_t width, int id) {
    const auto start = [&](int thread) { return (int)std::min<int64_t>(batch_.drawable, first_column(l, thread, width)); };
    const int from = start(id), count = start(id + 1) - from;
    for (int r = 0; r < batch_.logit_count; ++r)
      scans_[(size_t)r * pool_.size() + id] = scan_logits(batch_.logits + r * width + from, count, from);
  }

  // Where the outputs of a thread's share begin.
  static int64_t first_column(const Linear& l, int thread, int64_t width) {
    const size_t unit = (size_t)l.begin[thread];
    return unit < l.units.size() ? l.units[unit].column : width;
  }

  void join_scans() {
    for (int r = 0; r < batch_.logit_count; ++r) {
      LogitScan all = scans_[(size_t)r * pool_.size()];
      for (int id = 1; id < pool_.size(); ++id) all.join(scans_[(size_t)r * pool_.size() + id]);
      batch_.best[r] = all.place;
      batch_.finite[r] = all.finite;
    }
  }

  // --- attention --------------------------------------------------------------------------------------------------------

  Split attention(int i, int id) {
    const Operation& op = ops_[i];
    const AttentionPlan& plan = plans_[plan_of_[i]];
    const View &q = views_[op.in0], &out = views_[op.out];
    const AttentionCall call = {at(op.in0, 0), at(op.out, 0), q.stride,  out.stride, q.width, layer_cache(op), &batch_,
                                &batch_.groups[op.group], op.window, op.scale, op.cap, &partial_};
    pool_.barrier();
    take_pieces(call, plan, &counters_[i], id);
    if (!plan.split) return OTHERWISE;
    pool_.barrier();
    const auto [from, to] = rows_of(id, batch_.tokens);
    for (size_t s = 0; s < plan.spans.size(); ++s) {
      const SpanItem& item = plan.spans[s];
      if (item.num_spans > 1 && item.span == 0 && item.row >= from && item.row < to) merge_row(call, item, s);
    }
    return BY_ROWS;
  }

  void take_pieces(const AttentionCall& call, const AttentionPlan& plan, std::atomic<int>* next, int id) {
    const int kv_heads = call.cache.kv_heads, spans = (int)plan.spans.size(), blocks = (int)plan.blocks.size() * kv_heads;
    // Neighbouring heads lie side by side in the cache: with enough spans for everybody, one thread takes them all.
    const int heads = spans >= 4 * pool_.size() ? kv_heads : 1, total = blocks + spans * kv_heads / heads;
    for (int n; (n = next->fetch_add(1, std::memory_order_relaxed)) < total;) {
      if (n < blocks) {
#if defined(KVANT_AMX)
        const int late = blocks - 1 - n;  // late rows see most: first
        run_block(call, plan.blocks[late / kv_heads], late % kv_heads, scratch_[id].attention);
#endif
        continue;
      }
      const int first = (n - blocks) * heads;
      for (int h = first; h < first + heads; ++h) run_span(call, plan.spans[h / kv_heads], h / kv_heads, h % kv_heads);
    }
    (void)id;
  }

  static constexpr int TILE_ROWS = 16;  // from here on tiles beat integer products

  std::vector<Operation> ops_;
  std::vector<View> views_;
  std::vector<CacheGroup> groups_;
  std::vector<Frequencies> frequencies_;
  int64_t row_floats_, vocabulary_;
  std::vector<Linear> linears_;
  int angle_floats_ = 0;
  bool tiles_ = false, body_ = true;
  int64_t* times_ = nullptr;  // of `profile`

  Pool pool_;
  std::vector<Scratch> scratch_;
  std::vector<std::atomic<int>> counters_;
  Aligned<float> arena_, angles_;
  ActivationMemory shared_;
  Partial partial_;
  std::vector<AttentionPlan> plans_;
  std::vector<int> plan_of_;  // of every operation
  std::vector<LogitScan> scans_;  // [logit rows, threads]
  std::vector<GroupBatch> group_batches_;
  Batch batch_ = {};
  int64_t capacity_ = 0;  // rows of the arena
};

}  // namespace kvant
