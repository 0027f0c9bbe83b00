// What this processor reaches at best, as denominators for measurements: nothing that is timed elsewhere can be faster.
//
//     read       all threads sum a large array, each its own part, over and over: bytes per second
//     products   the instruction that many rows are multiplied with, on registers alone: operations per second
//                AMX bf16 tiles (2 x 16 x 16 x 32 operations each), else VNNI bytes, else fused multiply-adds
//
// How fast memory is depends on how much of it is read again and again: a model that stays in the last-level cache is read
// several times faster. So the caller says how many bytes, and names the size beside the result.
#pragma once

#include <chrono>

#include "dot.h"
#include "pool.h"
#include "tile.h"

namespace kvant {

struct Measurement {
  const uint64_t* data;
  int64_t words;
  int rounds;
  std::atomic<uint64_t> sink{0};
};

static inline double timed(Pool& pool, void (*work)(void*, int), void* context) {
  const auto start = std::chrono::steady_clock::now();
  pool.run(work, context);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Reading {
  Measurement* m;
  Pool* pool;
};

static inline void read_part(void* context, int id) {
  Measurement& m = *((Reading*)context)->m;
  const int size = ((Reading*)context)->pool->size();
  const int64_t from = m.words * id / size, to = m.words * (id + 1) / size;
  uint64_t sums[32] = {};
  for (int round = 0; round < m.rounds; ++round) {
    for (int64_t i = from; i + 32 <= to; i += 32)
      for (int k = 0; k < 32; ++k) sums[k] += m.data[i + k];  // four registers of 512 bits
    __asm__ volatile("" : : : "memory");
  }
  uint64_t sum = 0;
  for (uint64_t s : sums) sum += s;
  m.sink += sum;
}

// Seconds that `rounds` readings of data [words] take.
static inline double read_seconds(Pool& pool, const uint64_t* data, int64_t words, int rounds) {
  Measurement m = {data, words, rounds};
  Reading reading = {&m, &pool};
  return timed(pool, read_part, &reading);
}

// Operations of one round of `multiply`, on one thread.
#if defined(KVANT_AMX)
constexpr double ROUND_OPERATIONS = 4 * 2.0 * 16 * 16 * 32;
#elif defined(KVANT_AVX512)
constexpr double ROUND_OPERATIONS = 8 * 2.0 * 64;
#else
constexpr double ROUND_OPERATIONS = 64 * 2.0;
#endif

static inline void multiply(void* context, int) {
  Measurement& m = *(Measurement*)context;
#if defined(KVANT_AMX)
  configure_tiles();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  alignas(64) uint16_t ones[TILE_ELEMENTS];
  for (int i = 0; i < TILE_ELEMENTS; ++i) ones[i] = (uint16_t)(0x3f80 + i % 97);
  fence_memory();
  _tile_loadd(4, ones, 64);
  _tile_loadd(5, ones, 64);
  _tile_loadd(6, ones, 64);
  _tile_loadd(7, ones, 64);
  for (int i = 0; i < m.rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  release_tiles();
#elif defined(KVANT_AVX512)
  __m512i sums[8], a = _mm512_set1_epi32(0x01030507), b = _mm512_set1_epi32(0x02040608);
  for (auto& s : sums) s = _mm512_setzero_si512();
  for (int i = 0; i < m.rounds; ++i) {
    for (auto& s : sums) s = _mm512_dpbusd_epi32(s, a, b);
    __asm__ volatile("" : "+v"(a), "+v"(b));
  }
  for (auto& s : sums) m.sink += (uint64_t)_mm512_reduce_add_epi32(s);
#else
  float sums[64] = {}, a = 1.0001f, b = 0.9999f;
  for (int i = 0; i < m.rounds; ++i) {
    for (float& s : sums) s = s * a + b;
    __asm__ volatile("" : "+x"(a), "+x"(b));
  }
  for (float s : sums) m.sink += (uint64_t)s;
#endif
}

// Operations per second of all threads together. Tiles only where the system grants them.
static inline double product_rate(Pool& pool, int rounds) {
#if defined(KVANT_AMX)
  if (!request_tiles()) return 0;
#endif
  Measurement m = {nullptr, 0, rounds};
  const double seconds = timed(pool, multiply, &m);
  return ROUND_OPERATIONS * rounds * pool.size() / seconds;
}

}  // namespace kvant
