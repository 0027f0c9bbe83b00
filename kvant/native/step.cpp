// What Python calls: plain functions over plain structures (abi.py). No exception crosses.
#include "ceilings.h"
#include "draw.h"
#include "executor.h"

using kvant::Executor;

namespace {

template <class Function>
int guarded(Function function) {
  try {
    return function();
  } catch (const std::exception&) {
    return kvant::NO_MEMORY;
  }
}

// function(row) for every row, on all threads.
template <class Function>
void for_rows(Executor* e, int rows, Function function) {
  struct Work {
    Function* function;
    int rows;
    std::atomic<int> next{0};
  } work;
  work.function = &function;
  work.rows = rows;
  e->pool().run(
      [](void* context, int) {
        Work& w = *(Work*)context;
        for (int row; (row = w.next.fetch_add(1)) < w.rows;) (*w.function)(row);
      },
      &work);
}

}  // namespace

extern "C" {

int kvant_tiles_granted() {
#if defined(KVANT_AMX)
  return kvant::request_tiles();
#else
  return 0;
#endif
}

int kvant_has_tiles(const Executor* e) { return e->tiles(); }

// Threads that came up: fewer than asked for where the system allows no more.
int kvant_threads(Executor* e) { return e->pool().size(); }

// 3: AVX-512 VNNI, 2: AVX2 with VNNI, 1: AVX2, 0: portable.
int kvant_vector_level() {
#if defined(KVANT_AVX512)
  return 3;
#elif defined(KVANT_AVXVNNI)
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
  return guarded([&] {
    kvant::Pool pool(threads);
    return kvant::pack_all({sources, packings, outs, fits, count}, pool);
  });
}

void kvant_decode_row(int format, const uint8_t* row, int columns, float* out) { kvant::decode_row(format, row, columns, 1.0f, out); }

Executor* kvant_create(const kvant::Operation* ops, int num_ops, const kvant::View* views, int num_views, const kvant::Segment* segments,
                       int num_segments, const kvant::CacheGroup* groups, int num_groups, const kvant::Frequencies* frequencies,
                       int num_frequencies, int64_t row_floats, int vocabulary, int threads, int deterministic) {
  try {
    kvant::Description program = {{ops, ops + num_ops},
                                  {views, views + num_views},
                                  {segments, segments + num_segments},
                                  {groups, groups + num_groups},
                                  {frequencies, frequencies + num_frequencies},
                                  row_floats,
                                  vocabulary};
    return new Executor(std::move(program), threads, deterministic != 0);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void kvant_destroy(Executor* e) { delete e; }

int kvant_run(Executor* e, const kvant::Batch* batch) {
  return guarded([&] { return e->run(*batch); });
}

int kvant_head(Executor* e, const int64_t* rows, int count, float* logits) {
  return guarded([&] { return e->head(rows, count, logits); });
}

// The last run's final hidden states: row t at kvant_hidden(e) + t * kvant_hidden_stride(e).
const float* kvant_hidden(const Executor* e) { return e->hidden(); }
int64_t kvant_hidden_stride(const Executor* e) { return e->hidden_stride(); }

// Draws of every row from its first `count` logits.
void kvant_draw(Executor* e, const kvant::DrawRow* rows, int num_rows, int count) {
  std::vector<kvant::Aligned<float>> scratch(num_rows);
  for_rows(e, num_rows, [&](int row) { kvant::draw_row(rows[row], count, scratch[row]); });
}

// The k largest of every row, in order: ids and values [rows, k].
void kvant_top_k(Executor* e, const float* logits, int64_t stride, int rows, int count, int k, int64_t* ids, float* values) {
  for_rows(e, rows, [&](int row) { kvant::top_k_row(logits + row * stride, count, k, ids + (int64_t)row * k, values + (int64_t)row * k); });
}

// Adds the nanoseconds of every operation to `times` from now on; null: no more.
void kvant_profile(Executor* e, int64_t* times) { e->profile(times); }

// What the machine reaches at best (ceilings.h): seconds for `rounds` readings of data [words]; operations per second.
double kvant_read_seconds(const uint64_t* data, int64_t words, int rounds, int threads) {
  kvant::Pool pool(threads);
  return kvant::read_seconds(pool, data, words, rounds);
}

double kvant_product_rate(int rounds, int threads) {
  kvant::Pool pool(threads);
  return kvant::product_rate(pool, rounds);
}

}  // extern "C"
