// K2: one query row over many keys, bound by memory. Vectors run along head_dim; the heads that
// share a KV head read its keys and values together. K, then V, of a few tokens at a time are read
// for all heads, in the order in which they lie in memory: that is what the processor's prefetcher
// follows, and one core needs it to keep enough reads under way.
#pragma once

#include "convert.h"
#include "fetch.h"
#include "rows.h"
#include "scores.h"
#include "simd.h"
#include "tokens.h"

namespace {

using ellm::Call;
using ellm::kDecodeStep;
using ellm::Part;

// Tokens whose K, or V, is read for all heads before the next ones', at least, and how many bytes
// are rather read so: more means less to do between heads, fewer that memory is read in the order in
// which it lies there. Of small rows a few tokens are next to nothing to read. A multiple of eight:
// scores of eight keys lie together (`Places`).
constexpr int kRun = 8;
constexpr int64_t kRunBytes = 8192;

INLINE int run_of(int64_t row_bytes) {
  const int64_t fitting = kRunBytes / row_bytes / kRun * kRun;
  return static_cast<int>(fitting < kRun ? kRun : fitting < kDecodeStep ? fitting : kDecodeStep);
}

// sums[i][0..DV·W) += Σ_t weights[t][i] v[t] over four tokens.
template <int NQ, int DV, class T>
INLINE void multiply_values(const typename T::bits* const (&v)[4], const float* weights,
                            vf (&sums)[NQ][DV]) {
  using P = Places<NQ>;
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) {
    vf value[DV];
#pragma GCC unroll 8
    for (int j = 0; j < DV; j += T::unit) T::load_unit(v[t] + j * W, value + j);
#pragma GCC unroll 4
    for (int i = 0; i < NQ; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < DV; ++j) sums[i][j] += weights[P::of(t, i)] * value[j];
    }
  }
}

// The same of a type that `dots`: weights are bf16.
template <int NQ, int DV, class T>
INLINE void multiply_values(const typename T::bits* const (&v)[4], const uint16_t* weights,
                            vf (&sums)[NQ][DV]) {
  using P = Places<NQ>;
#pragma GCC unroll 2
  for (int t = 0; t < 4; t += 2) {
    vu values[DV];
#pragma GCC unroll 8
    for (int j = 0; j < DV; j += T::unit) {
      T::interleave_unit(v[t] + j * W, v[t + 1] + j * W, values + j);
    }
#pragma GCC unroll 4
    for (int i = 0; i < NQ; ++i) {
      const vu pair = splat_word(load_word(weights + P::of(t, i)));
#pragma GCC unroll 8
      for (int j = 0; j < DV; ++j) sums[i][j] = T::add_dots(sums[i][j], values[j], pair);
    }
  }
}

// o[i][0..DV·W) = rescale[i] · o[i] + Σ_n weights[n][i] v[n]; null: 1.
template <int NQ, int DV, class T>
INLINE void add_values(const Run run, const WeightOf<T>* weights, const float* rescale, float* o,
                         int head_dim) {
  using P = Places<NQ>;
  vf sums[NQ][DV];
#pragma GCC unroll 4
  for (int i = 0; i < NQ; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < DV; ++j) {
      sums[i][j] = load(o + i * head_dim + j * W);
      if (rescale != nullptr) sums[i][j] *= rescale[P::of(0, i)];
    }
  }
  for (int n = 0; n < run.count; n += 4) {
    if (run.ahead != nullptr) run.ahead->fetch(4 * head_dim * sizeof(typename T::bits));
    multiply_values<NQ, DV, T>(run.four<typename T::bits>(n).rows, weights + P::of(n, 0), sums);
  }
#pragma GCC unroll 4
  for (int i = 0; i < NQ; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < DV; ++j) store(o + i * head_dim + j * W, sums[i][j]);
  }
}

// Query heads that go together: `first` of `kv_head`'s, the `index`-th such vector of the row.
struct Heads {
  int kv_head, first, index;
  bool leads;  // the first of its KV head
};

// Calls work(Heads, Count<heads>) for all query heads, at most kQueries at once.
template <class F>
INLINE void for_heads(const Call& call, const F& work) {
  const int group = call.heads / call.kv_heads;
  int index = 0;
  for (int kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
    const int begin = kv_head * group, end = begin + group;
    for (int h = begin; h < end; h += kQueries, ++index) {
      const Heads heads{kv_head, h, index, h == begin};
      const int count = end - h;
      if (kQueries >= 4 && count >= 4) {
        work(heads, Count<kQueries >= 4 ? 4 : 1>{});
      } else if (kQueries >= 4 && count == 3) {
        work(heads, Count<kQueries >= 4 ? 3 : 1>{});
      } else if (kQueries >= 2 && count >= 2) {
        work(heads, Count<kQueries >= 2 ? 2 : 1>{});
      } else {
        work(heads, Count<1>{});
      }
    }
  }
}

// Scratch of one row.
struct RowMemory {
  float* q;        // [heads, head_dim], as multiply_keys wants them
  float* scores;   // per vector of heads: [kQueries, kDecodeStep], then the weights
  float* softmax;  // per vector of heads: [3, W]

  INLINE RowMemory of(const Call& call, float* scratch) {
    float* const scores = scratch + int64_t{call.heads} * call.head_dim;
    return {scratch, scores, scores + int64_t{call.heads} * kQueries * kDecodeStep};
  }
  INLINE int64_t floats(const Call& call) {
    return int64_t{call.heads} * (call.head_dim + kQueries * kDecodeStep + 3 * W);
  }
  float* scores_of(const Heads& heads) const {
    return scores + heads.index * kQueries * kDecodeStep;
  }
  Softmax softmax_of(const Heads& heads) const {
    float* const own = softmax + heads.index * 3 * W;
    return {own, own + W, own + 2 * W};
  }
};

template <class T>
INLINE const void* query_of(const RowMemory& row, int64_t element) {
  if constexpr (T::dots) return reinterpret_cast<const uint16_t*>(row.q) + element;
  return row.q + element;
}

template <class T>
void attend_tokens(const Call& call, const Tokens& tokens, const Tokens* next, const RowMemory& row,
                   float* o) {
  constexpr int64_t kBytes = sizeof(typename T::bits);
  const int head_dim = call.head_dim;
  const int64_t head_bytes = head_dim * kBytes, row_bytes = call.kv_heads * head_bytes;
  const int all = (tokens.count + 3) / 4 * 4;
  const int size = run_of(row_bytes);
  const auto run_at = [&](const char* const* rows, int n, const Heads& heads, RowsAhead& ahead) {
    return Run{rows + n, all - n < size ? all - n : size, heads.kv_head * head_bytes,
               heads.leads ? &ahead : nullptr};
  };
  RowsAhead keys(next != nullptr ? next->k : nullptr, tokens.v, row_bytes, call.hint);
  for (int n = 0; n < all; n += size) {
    for_heads(call, [&](const Heads& heads, auto queries) {
      constexpr int NQ = decltype(queries)::value;
      score_keys<NQ, T>(run_at(tokens.k, n, heads, keys), query_of<T>(row, heads.first * head_dim),
                        head_dim, scale_of<T>(call.scale),
                        row.scores_of(heads) + Places<NQ>::of(n, 0));
    });
  }
  for_heads(call, [&](const Heads& heads, auto queries) {
    weigh<decltype(queries)::value, T>(row.scores_of(heads), tokens.count, row.softmax_of(heads));
  });
  RowsAhead values(next != nullptr ? next->v : nullptr, next != nullptr ? next->k : nullptr,
                   row_bytes, call.hint);
  for (int n = 0; n < all; n += size) {
    for_heads(call, [&](const Heads& heads, auto queries) {
      constexpr int NQ = decltype(queries)::value;
      Run run = run_at(tokens.v, n, heads, values);
      const auto* const weights =
          reinterpret_cast<const WeightOf<T>*>(row.scores_of(heads)) + Places<NQ>::of(n, 0);
      const float* const rescale = n == 0 ? row.softmax_of(heads).rescale : nullptr;
      int d = 0;
      const auto add = [&](auto vectors) {
        constexpr int DV = decltype(vectors)::value;
        for (; d + DV * W <= head_dim; d += DV * W) {
          add_values<NQ, DV, T>(run, weights, rescale, o + heads.first * head_dim + d, head_dim);
          run.offset += DV * W * kBytes;
          run.ahead = nullptr;
        }
      };
      if constexpr (NQ <= 2) add(Count<8>{});
      add(Count<4>{});
      add(Count<2>{});
      if constexpr (T::unit == 1) add(Count<1>{});
    });
  }
}

// The same, a row at a time: see rows.h.
void attend_rows(const Call& call, const Tokens& tokens, const Tokens* next, const RowMemory& row,
                 float* o) {
  constexpr int kStride = kQueries * kDecodeStep;  // of scores, from one head to the next
  const int size = call.heads * call.head_dim;
  const auto at = [](const char* place) { return reinterpret_cast<const float*>(place); };
  const auto fetch = [&](const char* row) {
    fetch_lines(row, size * static_cast<int64_t>(sizeof(float)), call.hint);
  };
  for (int n = 0; n < tokens.count; ++n) {
    if (next != nullptr) fetch(next->k[n]);
    score_row(at(tokens.k[n]), row.q, call.heads, call.head_dim, call.scale, row.scores + n,
              kStride);
  }
  for_heads(call, [&](const Heads& heads, auto) {
    const Softmax softmax = row.softmax_of(heads);
    weigh<1, Float32>(row.scores_of(heads), tokens.count, softmax);
    const vf rescale = splat(softmax.rescale[0]);
    float* const own = o + heads.first * call.head_dim;
    for (int d = 0; d < call.head_dim; d += W) store(own + d, load(own + d) * rescale);
  });
  for (int n = 0; n < tokens.count; ++n) {
    if (next != nullptr) fetch(next->v[n]);
    add_row(at(tokens.v[n]), row.scores + n, call.heads, call.head_dim, o, kStride);
  }
}

// Elements of each unit of `count` vectors to where T::place says, or back.
template <class T, class F>
INLINE void for_places(int64_t count, const F& move) {
  constexpr int kUnit = T::unit * W;
  for (int64_t at = 0; at < count; at += kUnit) {
    for (int e = 0; e < kUnit; ++e) move(at + e, at + T::place(e));
  }
}

template <class T>
void decode_as(const Call& call, const Part& part, const Part* ahead, int64_t row, float* scratch,
               float* o, float* m, float* l) {
  constexpr int64_t kBytes = sizeof(typename T::bits);
  const int64_t size = int64_t{call.heads} * call.head_dim;
  const RowMemory memory = RowMemory::of(call, scratch);
  for (int64_t i = 0; i < size; ++i) o[i] = 0;
  if constexpr (T::dots) {
    const auto* const q = static_cast<const uint16_t*>(call.q) + row * call.q_stride;
    __builtin_memcpy(memory.q, q, size * sizeof *q);
  } else {
    for_places<T>(size, [&](int64_t e, int64_t place) {
      memory.q[place] = ellm::load_as_float(call.q, row * call.q_stride + e, call.row_type);
    });
  }
  for_heads(call, [&](const Heads& heads, auto) {
    const Softmax softmax = memory.softmax_of(heads);
    store(softmax.maximum, splat(-__builtin_inff()));
    store(softmax.total, vf{});
  });
  StepsAhead steps(call, part, ahead, kBytes);
  for (int64_t from = part.begin; from < part.end; from += kDecodeStep) {
    const Tokens* const next = steps.advance();
    if (in_sequence(call, kBytes)) {
      attend_rows(call, steps.now(), next, memory, o);
    } else {
      attend_tokens<T>(call, steps.now(), next, memory, o);
    }
  }
  for_heads(call, [&](const Heads& heads, auto queries) {
    using P = Places<decltype(queries)::value>;
    const Softmax softmax = memory.softmax_of(heads);
    for (int i = 0; i < decltype(queries)::value; ++i) {
      m[heads.first + i] = softmax.maximum[P::of(0, i)] / (T::dots ? kLogarithmOfE : 1);
      l[heads.first + i] = 0;
      for (int n = 0; n < P::keys; ++n) l[heads.first + i] += softmax.total[P::of(n, i)];
    }
  });
  if constexpr (T::unit > 1) {
    float* const ordered = memory.q;
    for_places<T>(size, [&](int64_t e, int64_t place) { ordered[e] = o[place]; });
    __builtin_memcpy(o, ordered, size * sizeof(float));
  }
}

}  // namespace
