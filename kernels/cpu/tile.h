// K1: up to kColumns queries over all keys they see, bound by arithmetic. Vectors run along the
// queries: with Q transposed once, K and V are read as they lie in the pool, one element against
// a vector of queries, and the softmax needs no operation across a vector.
#pragma once

#include "convert.h"
#include "simd.h"
#include "tokens.h"

namespace {

using ellm::Call;
using ellm::kColumns;
using ellm::kKeys;
using ellm::Source;

// Vectors of queries worked on together: 4 × 4 sums fill half of AVX-512's registers, 4 × 2 of the
// others'; that many independent sums hide the latency of a multiply-add.
constexpr int kVectors = W == 16 ? 4 : 2;

// Scratch of one tile; matrices are [.., kColumns].
struct TileMemory {
  float* q;          // [head_dim]: Q transposed, times scale
  float* o;          // [head_dim]: sums
  float* scores;     // [kKeys]
  float* maximum;    // [1]
  float* total;      // [1]
  float* rescale;    // [1]
  int32_t* position; // [1]
  float* k;          // [kKeys, head_dim]: converted, where the pool is not fp32
  float* v;
};

INLINE TileMemory divide(float* scratch, int head_dim) {
  TileMemory t;
  t.q = scratch;
  t.o = t.q + head_dim * kColumns;
  t.scores = t.o + head_dim * kColumns;
  t.maximum = t.scores + kKeys * kColumns;
  t.total = t.maximum + kColumns;
  t.rescale = t.total + kColumns;
  t.position = reinterpret_cast<int32_t*>(t.rescale + kColumns);
  t.k = t.rescale + 2 * kColumns;
  t.v = t.k + kKeys * head_dim;
  return t;
}

INLINE int64_t tile_floats(int head_dim) {
  return (2 * int64_t{head_dim} + kKeys + 4) * kColumns + 2 * int64_t{head_dim} * kKeys;
}

// scores[n][c] = Σ_d k[n][d] q[d][c] for R keys and NV vectors of columns.
template <int R, int NV>
INLINE void multiply_keys(const float* const* k, const float* q, int head_dim, float* scores) {
  vf sums[R][NV] = {};
  for (int d = 0; d < head_dim; ++d) {
    vf column[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) column[j] = load(q + d * kColumns + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const vf key = splat(k[i][d]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sums[i][j] += key * column[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(scores + i * kColumns + j * W, sums[i][j]);
  }
}

// o[d][c] = rescale[c] · o[d][c] + Σ_n v[n][d] weights[n][c] for R dimensions from `first`.
template <int R, int NV>
INLINE void multiply_values(const float* const* v, int first, int count, const float* weights,
                            const float* rescale, float* o) {
  vf sums[R][NV];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      sums[i][j] = load(o + i * kColumns + j * W) * load(rescale + j * W);
    }
  }
  for (int n = 0; n < count; ++n) {
    vf column[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) column[j] = load(weights + n * kColumns + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const vf value = splat(v[n][first + i]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sums[i][j] += value * column[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(o + i * kColumns + j * W, sums[i][j]);
  }
}

// Scores to weights for one vector of columns. `masked`: some column does not see some key.
INLINE void weigh_columns(const TileMemory& t, int column, int64_t first_key, int count,
                          bool masked) {
  float* scores = t.scores + column;
  const vf before = load(t.maximum + column);
  vf largest = before;
  if (masked) {
    const vi position = load_ints(t.position + column);
    const vi hidden = (vi)splat(-__builtin_inff());
    for (int n = 0; n < count; ++n) {
      const vi sees = position >= static_cast<int32_t>(first_key + n);
      const vi score = (vi)load(scores + n * kColumns);
      const vf seen = (vf)((sees & score) | (~sees & hidden));
      store(scores + n * kColumns, seen);
      largest = larger(seen, largest);
    }
  } else {
    for (int n = 0; n < count; ++n) largest = larger(load(scores + n * kColumns), largest);
  }
  vf sum = {};
  for (int n = 0; n < count; ++n) {
    const vf weight = exponential(load(scores + n * kColumns) - largest);
    store(scores + n * kColumns, weight);
    sum += weight;
  }
  const vf rescale = exponential(before - largest);
  store(t.rescale + column, rescale);
  store(t.maximum + column, largest);
  store(t.total + column, load(t.total + column) * rescale + sum);
}

template <int NV>
void attend_columns(const TileMemory& t, int column, const float* const* k, const float* const* v,
                    int64_t first_key, int count, int head_dim, bool masked) {
  constexpr int R = NV <= 2 && W == 16 ? 8 : 4;
  static_assert(ellm::kDecodeStep % R == 0, "entries beyond the last key repeat it");
  for (int n = 0; n < count; n += R) {
    multiply_keys<R, NV>(k + n, t.q + column, head_dim, t.scores + n * kColumns + column);
  }
  for (int j = 0; j < NV; ++j) weigh_columns(t, column + j * W, first_key, count, masked);
  const float *weights = t.scores + column, *rescale = t.rescale + column;
  int d = 0;
  for (; d + R <= head_dim; d += R) {
    multiply_values<R, NV>(v, d, count, weights, rescale, t.o + d * kColumns + column);
  }
  for (; d < head_dim; d += 4) {
    multiply_values<4, NV>(v, d, count, weights, rescale, t.o + d * kColumns + column);
  }
}

// fp32 rows of this KV head: in place where the pool is fp32, else a converted copy.
template <class T>
INLINE void as_floats(const char* const* tokens, int count, int kv_head, int head_dim,
                      float* converted, const float** rows) {
  for (int n = 0; n < (count + 7) / 8 * 8; ++n) {
    const auto* row = reinterpret_cast<const typename T::bits*>(tokens[n]) +
                      int64_t{kv_head} * head_dim;
    if constexpr (sizeof(typename T::bits) == sizeof(float)) {
      rows[n] = row;
    } else {
      rows[n] = converted + (n < count ? n : count - 1) * head_dim;
      if (n >= count) continue;
      for (int d = 0; d < head_dim; d += W) store(converted + n * head_dim + d, T::load_floats(row + d));
    }
  }
}

template <class T>
void tile_as(const Call& call, const Source& source, int64_t row, int64_t position, int kv_head,
             int64_t first, int columns, float* scratch) {
  const int head_dim = call.head_dim, group = call.heads / call.kv_heads;
  const TileMemory t = divide(scratch, head_dim);
  for (int c = 0; c < kColumns; ++c) {
    // Columns beyond the last repeat it: they compute, and nobody looks.
    const int64_t column = first + (c < columns ? c : columns - 1);
    const int64_t r = column / group, head = kv_head * group + column % group;
    const int64_t at = (row + r) * call.q_stride + head * head_dim;
    for (int d = 0; d < head_dim; ++d) {
      t.q[d * kColumns + c] = ellm::load_as_float(call.q, at + d, call.row_type) * call.scale;
    }
    t.position[c] = static_cast<int32_t>(position + r);
    t.maximum[c] = -__builtin_inff();
    t.total[c] = 0;
  }
  for (int i = 0; i < head_dim * kColumns; ++i) t.o[i] = 0;

  Tokens tokens;
  const float *k[kKeys], *v[kKeys];
  const int64_t end = t.position[columns - 1] + 1;
  for (int64_t from = 0; from < end; from += kKeys) {
    const int count = end - from < kKeys ? static_cast<int>(end - from) : kKeys;
    locate(call, source, from, count, sizeof(typename T::bits), tokens);
    as_floats<T>(tokens.k, count, kv_head, head_dim, t.k, k);
    as_floats<T>(tokens.v, count, kv_head, head_dim, t.v, v);
    const bool masked = from + count - 1 > t.position[0];
    for (int c = 0; c < columns; c += kVectors * W) {
      const int vectors = (columns - c + W - 1) / W;
      switch (vectors < kVectors ? vectors : kVectors) {
        case 1: attend_columns<1>(t, c, k, v, from, count, head_dim, masked); break;
        case 2: attend_columns<2>(t, c, k, v, from, count, head_dim, masked); break;
        case 3: attend_columns<3>(t, c, k, v, from, count, head_dim, masked); break;
        default: attend_columns<4>(t, c, k, v, from, count, head_dim, masked);
      }
    }
  }

  for (int c = 0; c < columns; ++c) {
    const int64_t r = (first + c) / group, head = kv_head * group + (first + c) % group;
    const int64_t at = ((row + r) * call.heads + head) * head_dim;
    const float factor = 1.0f / t.total[c];
    for (int d = 0; d < head_dim; ++d) {
      ellm::store_float(call.out, at + d, call.row_type, t.o[d * kColumns + c] * factor);
    }
  }
}

}  // namespace
