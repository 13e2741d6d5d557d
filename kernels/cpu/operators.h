// RMS normalisation, rotary embedding and gated activation, a row at a time. They round wherever PyTorch, running one
// operator after the other, stores a result. A row's results are the same to the bit whatever rows
// it shares the call with.
#pragma once

#include "attention.h"
#include "convert.h"
#include "simd.h"

namespace {

using ellm::Gate;
using ellm::Norm;
using ellm::Rotation;

// x rounded as if it were stored as a T. Of fp32: not to be fused with an addition that follows.
INLINE vf rounded(vf x, Float32) {
  asm("" : "+x"(x));
  return x;
}

INLINE vf rounded(vf x, BFloat16) {
  const vu bits = (vu)x, near = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (vf)((x == x ? near : vu{} + 0x7fc00000u) & 0xffff0000u);
}

// Stores x, rounded.
INLINE void store_rounded(float* to, vf x, Float32) { store(to, x); }

INLINE void store_rounded(uint16_t* to, vf x, BFloat16 type) {
  const auto halves = __builtin_convertvector((vu)rounded(x, type) >> 16, vh_unaligned);
  *reinterpret_cast<vh_unaligned*>(to) = halves;
}

INLINE void store_rounded(uint16_t* to, vf x, Float16) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_maskz_cvtps_ph(0xffff, (__m512)x, 0));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, 0));
#else
  for (int i = 0; i < W; ++i) to[i] = ellm::float_to_half(x[i]);
#endif
}

INLINE vf rounded(vf x, Float16 type) {
  uint16_t bits[W];
  store_rounded(bits, x, type);
  return Float16::load_floats(bits);
}

// The first `count` elements, at most W, of a vector; the others are 0.
template <class T>
INLINE vf load_part(const typename T::bits* from, int64_t count) {
  if (count >= W) return T::load_floats(from);
  typename T::bits part[W] = {};
  __builtin_memcpy(part, from, count * sizeof *from);
  return T::load_floats(part);
}

template <class T>
INLINE void store_part(typename T::bits* to, vf x, int64_t count) {
  if (count >= W) return store_rounded(to, x, T{});
  typename T::bits part[W];
  store_rounded(part, x, T{});
  __builtin_memcpy(to, part, count * sizeof *to);
}

INLINE float sum_of(vf x) {
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
}

template <class T>
void normalise_as(const Norm& n, int64_t first, int64_t last) {
  using bits = typename T::bits;
  constexpr int kSums = 4;  // additions under way at once
  const bits* const weight = static_cast<const bits*>(n.weight);
  for (int64_t row = first; row < last; ++row) {
    const int64_t at = row * n.size;
    const bits* const x = static_cast<const bits*>(n.x) + at;
    const bits* const residual = static_cast<const bits*>(n.residual) + at;  // if there is one
    bits* const out = static_cast<bits*>(n.out) + at;
    bits* const out_residual = static_cast<bits*>(n.out_residual) + at;
    const auto input = [&](int64_t d) {
      const vf own = load_part<T>(x + d, n.size - d);
      return n.residual == nullptr ? own : own + load_part<T>(residual + d, n.size - d);
    };
    vf sums[kSums] = {};
    const auto add = [&](int64_t d, vf& sum) {
      const vf value = input(d);
      if (n.residual != nullptr) store_part<T>(out_residual + d, value, n.size - d);
      sum += value * value;
    };
    int64_t d = 0;
    for (; d + kSums * W <= n.size; d += kSums * W) {
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i) add(d + i * W, sums[i]);
    }
    for (; d < n.size; d += W) add(d, sums[0]);
    const float square = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) / n.size;
    const float factor = 1 / __builtin_sqrtf(square + n.epsilon);
    for (d = 0; d < n.size; d += W) {
      const int64_t count = n.size - d;
      store_part<T>(out + d, input(d) * factor * load_part<T>(weight + d, count), count);
    }
  }
}

// Turns the halves of a head: element i with element i + half.
template <class T>
INLINE void rotate_head(typename T::bits* head, const typename T::bits* cosines, int64_t half) {
  const T type;
  for (int64_t d = 0; d < half; d += W) {
    const int64_t count = half - d;
    const vf cosine = load_part<T>(cosines + d, count), sine = load_part<T>(cosines + half + d, count);
    const vf a = load_part<T>(head + d, count), b = load_part<T>(head + half + d, count);
    store_part<T>(head + d, rounded(a * cosine, type) - rounded(b * sine, type), count);
    store_part<T>(head + half + d, rounded(b * cosine, type) + rounded(a * sine, type), count);
  }
}

template <class T>
void rotate_as(const Rotation& r, int64_t first, int64_t last) {
  using bits = typename T::bits;
  for (int64_t row = first; row < last; ++row) {
    const bits* const cosines = static_cast<const bits*>(r.cosines) + r.positions[row] * r.turned;
    const auto rotate = [&](void* rows, int64_t stride, int heads) {
      bits* const own = static_cast<bits*>(rows) + row * stride;
      for (int64_t h = 0; h < heads; ++h) {
        rotate_head<T>(own + h * r.head_dim, cosines, r.turned / 2);
      }
    };
    rotate(r.q, r.q_stride, r.heads);
    rotate(r.k, r.k_stride, r.kv_heads);
  }
}

template <class T>
void gate_as(const Gate& g, int64_t first, int64_t last) {
  using bits = typename T::bits;
  for (int64_t row = first; row < last; ++row) {
    const bits* const x = static_cast<const bits*>(g.x) + row * 2 * g.size;
    bits* const out = static_cast<bits*>(g.out) + row * g.size;
    for (int64_t d = 0; d < g.size; d += W) {
      const int64_t count = g.size - d;
      const vf a = load_part<T>(x + d, count), b = load_part<T>(x + g.size + d, count);
      const vf power = -a > kMostExponent ? splat(__builtin_inff()) : exponential(-a);
      const vf silu = a / (1.0f + power);
      store_part<T>(out + d, rounded(silu, T{}) * b, count);
    }
  }
}

}  // namespace
