// Operations that treat every row by itself: embedding, norms, rotary, the cache write, gated units, sums.
#pragma once

#include "acts.h"
#include "program.h"

namespace kvant {

static inline void norm_row(const float* x, int width, const float* weight, float eps, const float* residual, float* out) {
  const float inverse = inverse_rms(x, width, eps);
  for (int i = 0; i < width; i += LANES) {
    const int left = width - i;
    if (left >= LANES) {
      f32x16 y = load(x + i) * inverse * load(weight + i);
      if (residual) y += load(residual + i);
      store(out + i, y);
    } else {
      f32x16 y = load_part(x + i, left) * inverse * load_part(weight + i, left);
      if (residual) y += load_part(residual + i, left);
      store_part(out + i, y, left);
    }
  }
}

// cos and sin of one position: [cos count | sin count]. The angle is an fp32 product, as in the reference.
static inline void angles_row(const Frequencies& f, int64_t position, float* out) {
  for (int i = 0; i < f.count; ++i) {
    const double angle = (double)((float)position * f.inverse[i]);
    out[i] = (float)std::cos(angle) * f.scale;
    out[f.count + i] = (float)std::sin(angle) * f.scale;
  }
}

// The first 2 * count columns of every head turn, the rest stays. In place or not.
static inline void rotary_row(const float* x, int heads, int head_dim, const float* angles, int count, float* out) {
  for (int h = 0; h < heads; ++h) {
    const float* a = x + h * head_dim;
    float* b = out + h * head_dim;
    for (int i = 0; i < count; ++i) {
      const float first = a[i], second = a[i + count], c = angles[i], s = angles[count + i];
      b[i] = first * c - second * s;
      b[i + count] = second * c + first * s;
    }
    for (int i = 2 * count; i < head_dim; ++i) b[i] = a[i];
  }
}

// Halves of one layer's cache. A unit is 16 positions of one kv head: keys [head_dim][16], then values [16][head_dim].
struct LayerCache {
  uint16_t* base;
  int kv_heads, head_dim, block_size;

  int64_t unit_size() const { return (int64_t)2 * 16 * head_dim; }
  uint16_t* unit(int64_t block, int sub, int head) const {
    return base + ((block * (block_size / 16) + sub) * kv_heads + head) * unit_size();
  }
};

static inline void store_kv_row(const LayerCache& cache, int64_t slot, const float* k, const float* v) {
  const int64_t block = slot / cache.block_size;
  const int offset = (int)(slot % cache.block_size), size = cache.head_dim;
  for (int head = 0; head < cache.kv_heads; ++head) {
    uint16_t* unit = cache.unit(block, offset / 16, head);
    uint16_t* keys = unit + offset % 16;
    uint16_t* values = unit + 16 * size + offset % 16 * size;
    for (int h = 0; h < size; ++h) keys[16 * h] = to_half(k[head * size + h]);
    for (int h = 0; h < size; ++h) values[h] = to_half(v[head * size + h]);
  }
}

static inline f32x16 activate(f32x16 x, int activation) {
  if (activation == SILU) return x / (exponential(-x) + 1.0f);
  if (activation == GELU_TANH) return 0.5f * x * (tangent(0.7978845608f * (x + 0.044715f * x * x * x)) + 1.0f);
  float lanes[LANES];
  store(lanes, x);
  for (float& lane : lanes) lane = 0.5f * lane * (1.0f + std::erf(lane * 0.70710678f));
  return load(lanes);
}

static inline void gated_row(const float* gate_up, int width, int activation, float* out) {
  const float* up = gate_up + width;
  for (int i = 0; i < width; i += LANES) {
    const int left = width - i;
    if (left >= LANES) store(out + i, activate(load(gate_up + i), activation) * load(up + i));
    else store_part(out + i, activate(load_part(gate_up + i, left), activation) * load_part(up + i, left), left);
  }
}

static inline f32x16 soft_cap(f32x16 x, float cap) { return cap * tangent(x / cap); }

}  // namespace kvant
