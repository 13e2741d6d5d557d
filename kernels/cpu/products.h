// Matrix products of few rows, out = x · weightᵀ, bound by reading the weights: each is read once,
// in the order in which it lies in memory, for up to kProductRows rows of x, the most a call here
// has. Vectors run along the sum: a row's outputs are the same to the bit whatever rows it shares
// the call with.
#pragma once

#include "attention.h"
#include "convert.h"
#include "fetch.h"
#include "simd.h"

namespace {

using ellm::Product;

constexpr int kOutputs = 4;             // of a row at once: what store_lane stores
constexpr int kRowsAtOnce = W == 16 ? 4 : 2;  // 4 × 4 sums; a quarter of them is loaded per step

// sums[m][n] += x[m] · w[n], over the elements of one step.
template <int M, class T>
INLINE void multiply_step(const typename T::bits* const (&w)[kOutputs], const void* const* x,
                          int64_t d, vf (&sums)[M][kOutputs]) {
  if constexpr (T::dots) {
    vu weight[kOutputs];
#pragma GCC unroll 4
    for (int n = 0; n < kOutputs; ++n) weight[n] = load_words(w[n] + d);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const vu row = load_words(static_cast<const uint16_t*>(x[m]) + d);
#pragma GCC unroll 4
      for (int n = 0; n < kOutputs; ++n) sums[m][n] = T::add_dots(sums[m][n], row, weight[n]);
    }
  } else {
    vf weight[kOutputs][T::unit];
#pragma GCC unroll 4
    for (int n = 0; n < kOutputs; ++n) T::load_unit(w[n] + d, weight[n]);
#pragma GCC unroll 2
    for (int u = 0; u < T::unit; ++u) {
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const vf row = load(static_cast<const float*>(x[m]) + d + u * W);
#pragma GCC unroll 4
        for (int n = 0; n < kOutputs; ++n) sums[m][n] += row * weight[n][u];
      }
    }
  }
}

// What is asked for meanwhile: `bytes` from `from` on in each step. (Shared among the groups of
// rows: more reads than the core can keep under way would hold up everything after them.)
struct Ahead {
  const char* from;
  int64_t bytes;
  ellm::Hint hint;
};

// Four outputs of M rows. `x` as `prepare` leaves it.
template <int M, class T>
NOINLINE void multiply_rows(const typename T::bits* const (&w)[kOutputs], const void* const* x,
                            int64_t size, Ahead ahead, float (*out)[kOutputs]) {
  using bits = typename T::bits;
  constexpr int kStep = T::unit * W;
  vf sums[M][kOutputs] = {};
  int64_t d = 0;
  for (; d + kStep <= size; d += kStep) {
    fetch_lines(ahead.from, ahead.bytes, ahead.hint);
    ahead.from += ahead.bytes;
    multiply_step<M, T>(w, x, d, sums);
  }
  if (d < size) {  // x is padded with zeros, the weights are not
    bits rest[kOutputs][kStep] = {};
    const bits* padded[kOutputs];
    for (int n = 0; n < kOutputs; ++n) {
      __builtin_memcpy(rest[n], w[n] + d, (size - d) * sizeof(bits));
      padded[n] = rest[n] - d;
    }
    multiply_step<M, T>(padded, x, d, sums);
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    vf quad = add_quads(sums[m]);
#if W_FLOATS == 16
    quad += exchange<8>(quad);
#endif
    if constexpr (W > 4) quad += exchange<4 % W>(quad);
    store_lane(out[m], quad);
  }
}

// Rounds and stores `count` sums at element `at` of the output: four bf16 at once, since with few
// elements to a sum this is much of the work.
INLINE void store_outputs(const Product& p, int64_t at, const float (&sums)[kOutputs], int count) {
  if (count == kOutputs && p.type == ellm::kBFloat16) {
    uint16_t rounded[kOutputs];
    for (int j = 0; j < kOutputs; ++j) rounded[j] = ellm::float_to_bfloat(sums[j]);
    __builtin_memcpy(static_cast<uint16_t*>(p.out) + at, rounded, sizeof rounded);
  } else if (count == kOutputs && p.type == ellm::kFloat32) {
    __builtin_memcpy(static_cast<float*>(p.out) + at, sums, sizeof sums);
  } else {
    for (int j = 0; j < count; ++j) ellm::store_float(p.out, at + j, p.type, sums[j]);
  }
}

// Elements of a row of x as multiply_step wants it.
template <class T>
INLINE int64_t padded(int64_t size) {
  constexpr int kStep = T::unit * W;
  return (size + kStep - 1) / kStep * kStep;
}

// Rows of x, padded with zeros: fp32, elements where T::place says; of a type that `dots`, as they are.
template <class T>
void prepare_as(const Product& p, float* to) {
  using bits = typename T::bits;
  constexpr int kStep = T::unit * W;
  const int64_t size = padded<T>(p.size);
  for (int64_t m = 0; m < p.rows; ++m) {
    const bits* const x = static_cast<const bits*>(p.x) + m * p.x_stride;
    if constexpr (T::dots) {
      bits* const row = reinterpret_cast<bits*>(to) + m * size;
      __builtin_memcpy(row, x, p.size * sizeof(bits));
      __builtin_memset(row + p.size, 0, (size - p.size) * sizeof(bits));
    } else {
      float* const row = to + m * size;
      for (int64_t d = 0; d < size; d += kStep) {
        bits last[kStep] = {};
        const bool whole = d + kStep <= p.size;
        if (!whole) __builtin_memcpy(last, x + d, (p.size - d) * sizeof(bits));
        vf unit[T::unit];
        T::load_unit(whole ? x + d : last, unit);
        for (int u = 0; u < T::unit; ++u) store(row + d + u * W, unit[u]);
      }
    }
  }
}

// Outputs [first, last) of all rows.
template <class T>
void multiply_as(const Product& p, const float* prepared, int64_t first, int64_t last) {
  using bits = typename T::bits;
  const int64_t size = padded<T>(p.size), row_bytes = T::dots ? size * 2 : size * 4;
  const void* x[ellm::kProductRows];
  for (int64_t m = 0; m < p.rows; ++m) {
    x[m] = reinterpret_cast<const char*>(prepared) + m * row_bytes;
  }
  const int64_t groups = (p.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const bits* const weight = static_cast<const bits*>(p.weight);
  for (int64_t n = first; n < last; n += kOutputs) {
    const int count = last - n < kOutputs ? static_cast<int>(last - n) : kOutputs;
    const bits* w[kOutputs];
    for (int i = 0; i < kOutputs; ++i) w[i] = weight + (n + (i < count ? i : count - 1)) * p.size;
    // The weights of outputs to come, which lie behind these.
    const int64_t skipped = kOutputs * p.steps_ahead;
    Ahead ahead{reinterpret_cast<const char*>(w[0] + skipped * p.size), 0, p.hint};
    if (skipped > 0 && n + skipped + kOutputs <= p.outputs) {
      ahead.bytes = kOutputs * T::unit * W * sizeof(bits) / groups;
    }
    float sums[kRowsAtOnce][kOutputs];
    for (int64_t m = 0; m < p.rows; m += kRowsAtOnce) {
      const int64_t rows = p.rows - m < kRowsAtOnce ? p.rows - m : kRowsAtOnce;
      switch (rows) {
        case 1: multiply_rows<1, T>(w, x + m, p.size, ahead, sums); break;
        case 2: multiply_rows<2, T>(w, x + m, p.size, ahead, sums); break;
        case 3: multiply_rows<kRowsAtOnce < 3 ? 2 : 3, T>(w, x + m, p.size, ahead, sums); break;
        default: multiply_rows<kRowsAtOnce, T>(w, x + m, p.size, ahead, sums);
      }
      ahead.from += p.size / (T::unit * W) * ahead.bytes;
      for (int64_t i = 0; i < rows; ++i) {
        if (p.bias != nullptr) {
          for (int j = 0; j < count; ++j) sums[i][j] += ellm::load_as_float(p.bias, n + j, p.type);
        }
        store_outputs(p, (m + i) * p.outputs + n, sums[i], count);
      }
    }
  }
}

}  // namespace
