// K2: one query row over many keys, bound by memory. Vectors run along head_dim; the heads that
// share a KV head read its keys and values together. K, then V, of a few tokens at a time are read
// for all heads, in the order in which they lie in memory: that is what the processor's prefetcher
// follows, and one core needs it to keep enough reads under way.
#pragma once

#include "convert.h"
#include "simd.h"
#include "tokens.h"

namespace {

using ellm::Call;
using ellm::kDecodeStep;
using ellm::Source;

// Query heads taken through the keys together: as many as the registers hold.
constexpr int kQueries = W == 16 ? 4 : 2;

template <int N>
struct Count {
  static constexpr int value = N;
};

// Tokens whose V is read for all heads before the next ones': more means that the sums are loaded
// and stored less often, fewer that memory is read in longer pieces.
constexpr int kValues = 8;

// Asks for rows that will be read next: where the next block lies, the prefetcher cannot know.
// A little at a time, between pieces of arithmetic: more reads than the core can keep under way
// would hold up everything after them.
INLINE void fetch(const char* const* rows, int count, int64_t offset, int64_t bytes) {
  for (int i = 0; i < count; ++i) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows[i] + offset + at, 0, 2);
  }
}

// scores[i][0..4) = q[i] · k[0..4)
template <int NQ, class T>
INLINE void score_keys(const char* const* keys, int64_t head_bytes, const float* q, int head_dim,
                       float* scores) {
  using bits = typename T::bits;
  const bits *k0 = reinterpret_cast<const bits*>(keys[0] + head_bytes),
             *k1 = reinterpret_cast<const bits*>(keys[1] + head_bytes),
             *k2 = reinterpret_cast<const bits*>(keys[2] + head_bytes),
             *k3 = reinterpret_cast<const bits*>(keys[3] + head_bytes);
  vf sums[NQ][4] = {};
  for (int d = 0; d < head_dim; d += W) {
    const vf x0 = T::load_floats(k0 + d), x1 = T::load_floats(k1 + d);
    const vf x2 = T::load_floats(k2 + d), x3 = T::load_floats(k3 + d);
#pragma GCC unroll 4
    for (int i = 0; i < NQ; ++i) {
      const vf query = load(q + i * head_dim + d);
      sums[i][0] += query * x0;
      sums[i][1] += query * x1;
      sums[i][2] += query * x2;
      sums[i][3] += query * x3;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < NQ; ++i) store_quad(scores + i * kDecodeStep, sums[i]);
}

// o[i][0..DV*W) = rescale[i] · o[i] + Σ_n weights[i][n] v[n]
template <int NQ, int DV, class T>
INLINE void add_values(const char* const* values, int count, int64_t byte_offset,
                       const float* weights, const float* rescale, float* o, int head_dim) {
  using bits = typename T::bits;
  vf sums[NQ][DV];
#pragma GCC unroll 4
  for (int i = 0; i < NQ; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < DV; ++j) sums[i][j] = load(o + i * head_dim + j * W) * rescale[i];
  }
  for (int n = 0; n < count; ++n) {
    const bits* v = reinterpret_cast<const bits*>(values[n] + byte_offset);
    vf value[DV];
#pragma GCC unroll 4
    for (int j = 0; j < DV; ++j) value[j] = T::load_floats(v + j * W);
#pragma GCC unroll 4
    for (int i = 0; i < NQ; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < DV; ++j) sums[i][j] += weights[i * kDecodeStep + n] * value[j];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < NQ; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < DV; ++j) store(o + i * head_dim + j * W, sums[i][j]);
  }
}

// Scores to weights exp(score - maximum); updates the maximum and the sum of weights.
// Returns what sums so far are to be multiplied by.
INLINE float weigh(float* scores, int count, float& maximum, float& total) {
  for (int n = count; n % W; ++n) scores[n] = -__builtin_inff();
  vf largest = splat(maximum);
  for (int n = 0; n < count; n += W) largest = larger(load(scores + n), largest);
  const float now = largest_of(largest);
  vf sum = {};
  for (int n = 0; n < count; n += W) {
    const vf weight = exp_nonpositive(load(scores + n) - now);
    store(scores + n, weight);
    sum += weight;
  }
  const float rescale = exp_nonpositive(splat(maximum - now))[0];
  maximum = now;
  total = total * rescale + sum_of(sum);
  return rescale;
}

// Calls work(kv_head, first head, Count<heads>) for all query heads, at most kQueries at once.
template <class F>
INLINE void for_heads(const Call& call, const F& work) {
  const int group = call.heads / call.kv_heads;
  for (int kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
    const int end = (kv_head + 1) * group;
    for (int h = kv_head * group; h < end; h += kQueries) {
      switch (end - h < kQueries ? end - h : kQueries) {
        case 1: work(kv_head, h, Count<1>{}); break;
        case 2: work(kv_head, h, Count<2>{}); break;
        case 3: work(kv_head, h, Count<3>{}); break;
        default: work(kv_head, h, Count<4>{});
      }
    }
  }
}

// Scratch of one row: matrices are [heads, ..].
struct RowMemory {
  float* q;        // [head_dim], times scale
  float* scores;   // [kDecodeStep], then the weights
  float* rescale;  // [1]
};

INLINE int64_t row_floats(const Call& call) {
  return int64_t{call.heads} * (call.head_dim + kDecodeStep + 1);
}

template <class T>
void attend_tokens(const Call& call, const Tokens& tokens, const Tokens* next, const RowMemory& row,
                   float* o, float* m, float* l) {
  constexpr int64_t kBytes = sizeof(typename T::bits);
  const int head_dim = call.head_dim;
  const int64_t head_bytes = head_dim * kBytes;
  const int group = call.heads / call.kv_heads;
  for (int n = 0; n < tokens.count; n += 4) {
    for_heads(call, [&](int kv_head, int h, auto queries) {
      const bool first = h == kv_head * group;
      if (next != nullptr && first) fetch(next->k + n, 4, kv_head * head_bytes, head_bytes);
      score_keys<decltype(queries)::value, T>(tokens.k + n, kv_head * head_dim * kBytes,
                                              row.q + h * head_dim, head_dim,
                                              row.scores + h * kDecodeStep + n);
    });
  }
  for (int h = 0; h < call.heads; ++h) {
    row.rescale[h] = weigh(row.scores + h * kDecodeStep, tokens.count, m[h], l[h]);
  }
  for (int n = 0; n < tokens.count; n += kValues) {
    const int count = tokens.count - n < kValues ? tokens.count - n : kValues;
    for_heads(call, [&](int kv_head, int h, auto queries) {
      constexpr int NQ = decltype(queries)::value;
      const bool first = h == kv_head * group;
      if (next != nullptr && first) fetch(next->v + n, count, kv_head * head_bytes, head_bytes);
      int d = 0;
      const auto add = [&](auto vectors) {
        constexpr int DV = decltype(vectors)::value;
        for (; d + DV * W <= head_dim; d += DV * W) {
          add_values<NQ, DV, T>(tokens.v + n, count, (kv_head * head_dim + d) * kBytes,
                                row.scores + h * kDecodeStep + n, row.rescale + h,
                                o + h * head_dim + d, head_dim);
        }
      };
      add(Count<4>{});
      add(Count<2>{});
      add(Count<1>{});
    });
    if (n == 0) {
      for (int h = 0; h < call.heads; ++h) row.rescale[h] = 1;
    }
  }
}

template <class T>
void decode_as(const Call& call, const Source& source, int64_t row, int64_t begin, int64_t end,
               float* scratch, float* o, float* m, float* l) {
  constexpr int64_t kBytes = sizeof(typename T::bits);
  const int heads = call.heads, size = heads * call.head_dim;
  const RowMemory memory{scratch, scratch + size, scratch + size + heads * kDecodeStep};
  for (int i = 0; i < size; ++i) {
    const float q = ellm::load_as_float(call.q, row * call.q_stride + i, call.row_type);
    memory.q[i] = q * call.scale;
    o[i] = 0;
  }
  for (int h = 0; h < heads; ++h) {
    m[h] = -__builtin_inff();
    l[h] = 0;
  }
  Tokens both[2];
  const auto locate_keys = [&](int64_t from, Tokens& tokens) {
    const int count = end - from < kDecodeStep ? static_cast<int>(end - from) : kDecodeStep;
    locate(call, source, from, count, kBytes, tokens);
  };
  locate_keys(begin, both[0]);
  int now = 0;
  for (int64_t from = begin; from < end; from += kDecodeStep, now ^= 1) {
    const bool last = from + kDecodeStep >= end;
    if (!last) locate_keys(from + kDecodeStep, both[now ^ 1]);
    attend_tokens<T>(call, both[now], last ? nullptr : &both[now ^ 1], memory, o, m, l);
  }
}

}  // namespace
