// K1: up to kColumns queries over all keys they see, bound by arithmetic. Vectors run along the
// queries: with Q transposed once, K and V are read as they lie in the pool, one word against a
// vector of queries, and the softmax needs no operation across a vector. A word is an fp32 element
// or, of a type that `dots`, a pair of bf16: of K two dimensions, of V two tokens (interleaved).
#pragma once

#include "convert.h"
#include "scores.h"
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
  float* q;          // [head_dim]: Q transposed, times scale; [head_dim / 2]: pairs, as they are
  float* o;          // [head_dim]: sums
  float* scores;     // [kKeys]; weights lie where the scores were
  float* maximum;    // [1]
  float* total;      // [1]
  float* rescale;    // [1]
  int32_t* position; // [1]
  float* k;          // [kKeys, head_dim]: converted, where the pool is neither fp32 nor `dots`
  float* v;          // [kKeys, head_dim]: converted; [kKeys / 2, head_dim]: pairs
};

// What is multiplied at once, and vectors of it.
template <class T>
using WordOf = std::conditional_t<T::dots, uint32_t, float>;
template <class T>
constexpr int kElements = T::dots ? 2 : 1;  // of a word

template <class T>
INLINE auto load_column(const float* p) {
  if constexpr (T::dots) return load_words(p);
  else return load(p);
}

// sum + a · b, with one word a for all columns.
template <class T, class V>
INLINE vf multiply_add(vf sum, WordOf<T> a, V b) {
  if constexpr (T::dots) return T::add_dots(sum, splat_word(a), b);
  else return sum + splat(a) * b;
}

// What lasts from key to key: queries, sums, maxima and totals.
INLINE int64_t own_floats(int head_dim) { return (2 * int64_t{head_dim} + 4) * kColumns; }

INLINE int64_t tile_floats(int head_dim) {
  return own_floats(head_dim) + kKeys * kColumns + 2 * int64_t{head_dim} * kKeys;
}

// `t` with `own` for that.
INLINE TileMemory with_own(TileMemory t, float* own, int head_dim) {
  t.q = own;
  t.o = t.q + head_dim * kColumns;
  t.maximum = t.o + head_dim * kColumns;
  t.total = t.maximum + kColumns;
  t.rescale = t.total + kColumns;
  t.position = reinterpret_cast<int32_t*>(t.rescale + kColumns);
  return t;
}

INLINE TileMemory divide(float* scratch, int head_dim) {
  TileMemory t{};
  t.scores = scratch + own_floats(head_dim);
  t.k = t.scores + kKeys * kColumns;
  t.v = t.k + kKeys * head_dim;
  return with_own(t, scratch, head_dim);
}

// scores[n][c] = Σ_d k[n][d] q[d][c] for R keys and NV vectors of columns; times `scale` of a type
// that `dots`, whose Q is as it was given.
template <int R, int NV, class T>
INLINE void multiply_keys(const WordOf<T>* const* k, const float* q, int words, float scale,
                          float* scores) {
  vf sums[R][NV] = {};
  for (int d = 0; d < words; ++d) {
    decltype(load_column<T>(q)) column[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) column[j] = load_column<T>(q + d * kColumns + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const WordOf<T> key = k[i][d];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sums[i][j] = multiply_add<T>(sums[i][j], key, column[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      store(scores + i * kColumns + j * W, T::dots ? sums[i][j] * scale : sums[i][j]);
    }
  }
}

// o[d][c] = rescale[c] · o[d][c] + Σ_n v[n][d] weights[n][c] for R dimensions from `first`.
template <int R, int NV, class T>
INLINE void multiply_values(const WordOf<T>* const* v, int first, int words, const float* weights,
                            const float* rescale, float* o) {
  vf sums[R][NV];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      sums[i][j] = load(o + i * kColumns + j * W) * load(rescale + j * W);
    }
  }
  for (int n = 0; n < words; ++n) {
    decltype(load_column<T>(weights)) column[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) column[j] = load_column<T>(weights + n * kColumns + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const WordOf<T> value = v[n][first + i];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sums[i][j] = multiply_add<T>(sums[i][j], value, column[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(o + i * kColumns + j * W, sums[i][j]);
  }
}

// Scores to weights exp(score - maximum). Returns their sums.
INLINE vf weights_of(float* scores, int count, vf maximum) {
  vf sum = {};
  for (int n = 0; n < count; ++n) {
    const vf weight = exponential(load(scores + n * kColumns) - maximum);
    store(scores + n * kColumns, weight);
    sum += weight;
  }
  return sum;
}

// The same of a type that `dots`: rounded as `weigh` rounds them, and in pairs. Scores and maxima
// are logarithms to base 2.
INLINE vf pairs_of_weights(float* scores, int count, vf maximum) {
  const auto weight = [&](int n) {
    return round_to_bfloat(power_of_two(load(scores + n * kColumns) - maximum));
  };
  vf sum = {};
  for (int n = 0; n < count; n += 2) {
    const vu first = weight(n), second = n + 1 < count ? weight(n + 1) : vu{};
    store_words(scores + n / 2 * kColumns, first >> 16 | second);
    sum += (vf)first + (vf)second;
  }
  return sum;
}

// Scores to weights for one vector of columns. `masked`: some column does not see some key.
template <class T>
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
    vf of_odd = before;  // two chains of comparisons: one would be waited for
    for (int n = 0; n + 1 < count; n += 2) {
      largest = larger(load(scores + n * kColumns), largest);
      of_odd = larger(load(scores + (n + 1) * kColumns), of_odd);
    }
    if (count % 2 != 0) largest = larger(load(scores + (count - 1) * kColumns), largest);
    largest = larger(of_odd, largest);
  }
  if constexpr (T::dots) largest = round_up(largest);
  const vf sum = T::dots ? pairs_of_weights(scores, count, largest)
                         : weights_of(scores, count, largest);
  const vf rescale = T::dots ? power_of_two(before - largest) : exponential(before - largest);
  store(t.rescale + column, rescale);
  store(t.maximum + column, largest);
  store(t.total + column, load(t.total + column) * rescale + sum);
}

// Words of `count` tokens' K and V, of one KV head.
template <class T>
struct Words {
  int count;
  const WordOf<T> *k[kKeys], *v[kKeys / kElements<T>];
};

template <int NV, class T>
void attend_columns(const TileMemory& t, int column, const Words<T>& words, int64_t first_key,
                    const Call& call, bool masked) {
  constexpr int R = NV <= 2 && W == 16 ? 8 : 4;
  static_assert(ellm::kDecodeStep % R == 0, "entries beyond the last key repeat it");
  const int count = words.count, head_dim = call.head_dim;
  for (int n = 0; n < count; n += R) {
    multiply_keys<R, NV, T>(words.k + n, t.q + column, head_dim / kElements<T>,
                            scale_of<T>(call.scale), t.scores + n * kColumns + column);
  }
  for (int j = 0; j < NV; ++j) weigh_columns<T>(t, column + j * W, first_key, count, masked);
  const float *weights = t.scores + column, *rescale = t.rescale + column;
  const int rows = (count + kElements<T> - 1) / kElements<T>;
  int d = 0;
  for (; d + R <= head_dim; d += R) {
    multiply_values<R, NV, T>(words.v, d, rows, weights, rescale, t.o + d * kColumns + column);
  }
  for (; d < head_dim; d += 4) {
    multiply_values<4, NV, T>(words.v, d, rows, weights, rescale, t.o + d * kColumns + column);
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

// K in place, V of pairs of tokens interleaved; the last one's partner counts as 0.
template <class T>
INLINE void pair_words(const Tokens& tokens, int kv_head, int head_dim, float* pairs,
                       Words<T>& words) {
  const auto at = [&](const char* token) {
    return reinterpret_cast<const uint16_t*>(token) + int64_t{kv_head} * head_dim;
  };
  words.count = tokens.count;
  for (int n = 0; n < (tokens.count + 7) / 8 * 8; ++n) {
    words.k[n] = reinterpret_cast<const uint32_t*>(at(tokens.k[n]));
  }
  for (int n = 0; n < tokens.count; n += 2, pairs += head_dim) {
    words.v[n / 2] = reinterpret_cast<const uint32_t*>(pairs);
    const uint16_t *first = at(tokens.v[n]), *second = at(tokens.v[n + 1]);
    const uint32_t seen = n + 1 < tokens.count ? ~0u : 0u;
    for (int d = 0; d < head_dim; d += W) {
      store_words(pairs + d, load_halves(first + d) | (load_halves(second + d) << 16 & seen));
    }
  }
}

template <class T>
INLINE void find_words(const Tokens& tokens, int kv_head, int head_dim, const TileMemory& t,
                       Words<T>& words) {
  if constexpr (T::dots) {
    pair_words(tokens, kv_head, head_dim, t.v, words);
  } else {
    words.count = tokens.count;
    as_floats<T>(tokens.k, tokens.count, kv_head, head_dim, t.k, words.k);
    as_floats<T>(tokens.v, tokens.count, kv_head, head_dim, t.v, words.v);
  }
}

// Columns [first, first + columns) of rows row, row + 1, ... at positions position, ...
struct TileColumns {
  int64_t row, position;
  int kv_head;
  int64_t first;
  int columns;
};

template <class T>
INLINE void begin_tile(const Call& call, const TileColumns& of, const TileMemory& t) {
  const int head_dim = call.head_dim, group = call.heads / call.kv_heads;
  for (int c = 0; c < kColumns; ++c) {
    // Columns beyond the last repeat it: they compute, and nobody looks.
    const int64_t column = of.first + (c < of.columns ? c : of.columns - 1);
    const int64_t r = column / group, head = of.kv_head * group + column % group;
    const int64_t at = (of.row + r) * call.q_stride + head * head_dim;
    if constexpr (T::dots) {
      const auto* const q = static_cast<const uint16_t*>(call.q) + at;
      for (int d = 0; d < head_dim; d += 2) __builtin_memcpy(t.q + d / 2 * kColumns + c, q + d, 4);
    } else {
      for (int d = 0; d < head_dim; ++d) {
        t.q[d * kColumns + c] = ellm::load_as_float(call.q, at + d, call.row_type) * call.scale;
      }
    }
    t.position[c] = static_cast<int32_t>(of.position + r);
    t.maximum[c] = -__builtin_inff();
    t.total[c] = 0;
  }
  for (int i = 0; i < head_dim * kColumns; ++i) t.o[i] = 0;
}

// Divides by the sums of weights, and writes the rows. Element d of column c is o[d * d_step +
// c * c_step].
INLINE void finish_tile(const Call& call, const TileColumns& of, const TileMemory& t,
                        int64_t d_step, int64_t c_step) {
  const int head_dim = call.head_dim, group = call.heads / call.kv_heads;
  for (int c = 0; c < of.columns; ++c) {
    const int64_t column = of.first + c, head = of.kv_head * group + column % group;
    const int64_t at = ((of.row + column / group) * call.heads + head) * head_dim;
    const float factor = 1.0f / t.total[c];
    for (int d = 0; d < head_dim; ++d) {
      ellm::store_float(call.out, at + d, call.row_type, t.o[d * d_step + c * c_step] * factor);
    }
  }
}

template <class T>
void tile_as(const Call& call, const Source& source, const TileColumns& of, float* scratch) {
  const int head_dim = call.head_dim, columns = of.columns;
  const TileMemory t = divide(scratch, head_dim);
  begin_tile<T>(call, of, t);
  Tokens tokens;
  Words<T> words;
  const int64_t end = t.position[columns - 1] + 1;
  for (int64_t from = 0; from < end; from += kKeys) {
    const int count = end - from < kKeys ? static_cast<int>(end - from) : kKeys;
    locate(call, source, from, count, sizeof(typename T::bits), tokens);
    find_words(tokens, of.kv_head, head_dim, t, words);
    const bool masked = from + count - 1 > t.position[0];
    for (int c = 0; c < columns; c += kVectors * W) {
      const int vectors = (columns - c + W - 1) / W;
      switch (vectors < kVectors ? vectors : kVectors) {
        case 1: attend_columns<1, T>(t, c, words, from, call, masked); break;
        case 2: attend_columns<2, T>(t, c, words, from, call, masked); break;
        case 3: attend_columns<3, T>(t, c, words, from, call, masked); break;
        default: attend_columns<4, T>(t, c, words, from, call, masked);
      }
    }
  }
  finish_tile(call, of, t, kColumns, 1);
}

}  // namespace
