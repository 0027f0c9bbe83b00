// Sixteen fp32 lanes, on any machine.
//
// Everything that is not a dot product is written once, with the compiler's vector types: one zmm register with AVX-512, two
// ymm with AVX2, four with NEON or SSE. Only what the language cannot say (half precision, integer dot products, tiles) uses
// intrinsics, chosen here by macro:
//
//     KVANT_AVX512    AVX-512 with VNNI (Cascade Lake and Zen 4 on)
//     KVANT_AMX       and AMX bf16 tiles, with BF16 and VBMI (Sapphire Rapids on)
//     KVANT_AVX2      AVX2, FMA, F16C (Haswell and Zen on)
//     KVANT_AVXVNNI   and VNNI for registers of 32 bytes (Alder Lake on)
//     none            portable C++: NEON by way of the vector types, or what else there is (also -DKVANT_PORTABLE)
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(KVANT_PORTABLE)
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define KVANT_AVX512 1
#if defined(__AVX512VBMI__) && defined(__AVX512BF16__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define KVANT_AMX 1
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KVANT_AVX2 1
#if defined(__AVXVNNI__)
#define KVANT_AVXVNNI 1
#endif
#endif
#endif

#if defined(KVANT_AVX512) || defined(KVANT_AVX2) || defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvant {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

static inline f32x16 load(const float* p) {
  f32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

static inline f32x16 splat(float x) { return f32x16{} + x; }

// The first `count` lanes of p, zeros behind: rows need not end on a multiple of 16.
static inline f32x16 load_part(const float* p, int count) {
  float lanes[LANES] = {};
  std::memcpy(lanes, p, sizeof(float) * (count < LANES ? count : LANES));
  return load(lanes);
}

static inline void store_part(float* p, f32x16 v, int count) {
  float lanes[LANES];
  store(lanes, v);
  std::memcpy(p, lanes, sizeof(float) * (count < LANES ? count : LANES));
}

static inline float sum(f32x16 v) {
#if defined(KVANT_AVX512)
  return _mm512_reduce_add_ps((__m512)v);
#endif
  float lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

static inline float largest(f32x16 v) {
#if defined(KVANT_AVX512)
  return _mm512_reduce_max_ps((__m512)v);
#endif
  float lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] < lanes[i + width] ? lanes[i + width] : lanes[i];
  return lanes[0];
}

// Whether any lane of a comparison holds.
static inline bool any(i32x16 lanes) {
#if defined(KVANT_AVX512)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#else
  int32_t all = 0;
  for (int lane = 0; lane < LANES; ++lane) all |= lanes[lane];
  return all != 0;
#endif
}

static inline f32x16 maximum(f32x16 a, f32x16 b) { return a < b ? b : a; }

static inline f32x16 bits_to_float(u32x16 b) {
  f32x16 v;
  std::memcpy(&v, &b, sizeof v);
  return v;
}

static inline u32x16 float_to_bits(f32x16 v) {
  u32x16 b;
  std::memcpy(&b, &v, sizeof b);
  return b;
}

// Nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
static inline f32x16 round_even(f32x16 x) {
  const f32x16 magic = splat(12582912.0f);
  f32x16 shifted = x + magic;
  __asm__ volatile("" : "+m"(shifted));  // or the compiler would fold the two additions away under relaxed arithmetic
  return shifted - magic;
}

// e^x with a relative error below 3e-7; 0 (1e-38) far below, NaN stays NaN.
//     x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial of degree six for e^r, n into the exponent
static inline f32x16 exponential(f32x16 x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
#if defined(KVANT_AVX512)
  const f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 0x08);
#else
  const f32x16 n = round_even(x * 1.44269504f);
#endif
  f32x16 r = x - n * 0.693145752f;  // ln 2 in two parts: the first has zeros at its end, so that n times it is exact
  r = r - n * 1.42860677e-6f;
  f32x16 p = splat(1.0f / 720.0f);
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
#if defined(KVANT_AVX512)
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const i32x16 exponent = __builtin_convertvector(n, i32x16) + 127;
  return p * bits_to_float((u32x16)(exponent << 23));
#endif
}

static inline f32x16 tangent(f32x16 x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

// --- half precision -----------------------------------------------------------------------------------------------------

constexpr float HALF_MAX = 65504.0f;

static inline f32x16 from_half(const uint16_t* p) {
#if defined(KVANT_AVX512)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(KVANT_AVX2)
  const __m256 halves[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
                            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
  f32x16 v;
  std::memcpy(&v, halves, sizeof v);
  return v;
#else
  u16x16 h;
  std::memcpy(&h, p, sizeof h);
  const u32x16 wide = __builtin_convertvector(h, u32x16);
  // Exponent and mantissa moved into fp32's place, then scaled by 2^112: right for subnormals too.
  const f32x16 magnitude = bits_to_float((wide & 0x7fffu) << 13) * bits_to_float((u32x16{} + 0x77800000u));
  u32x16 bits = float_to_bits(magnitude) | ((wide & 0x8000u) << 16);
  const u32x16 special = (u32x16)((wide & 0x7c00u) == 0x7c00u);
  return bits_to_float(bits | (special & 0x7f800000u));
#endif
}

static inline float from_half(uint16_t h) {
#if defined(KVANT_AVX512) || defined(KVANT_AVX2)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)mantissa * 0x1p-24f;
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
#endif
}

// Nearest, ties to even. What is too large saturates (keys and values must not become infinite); NaN stays NaN.
static inline uint16_t to_half(float x) {
  x = x > HALF_MAX ? HALF_MAX : x;
  x = x < -HALF_MAX ? -HALF_MAX : x;
#if defined(KVANT_AVX512) || defined(KVANT_AVX2)
  return _cvtss_sh(x, 0);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7e00;
  if (magnitude < 0x38800000) {  // below 2^-14: a multiple of 2^-24
    float positive;
    std::memcpy(&positive, &magnitude, 4);
    return (uint16_t)(sign | (uint32_t)std::nearbyintf(positive * 0x1p24f));
  }
  return (uint16_t)(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13));
#endif
}

static inline float from_bf16(uint16_t b) {
  const uint32_t bits = (uint32_t)b << 16;
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

static inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace kvant
