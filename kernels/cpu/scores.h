// The scores of a decode row, and the weights they become. A vector of scores holds four keys of
// several query heads of one KV head, so that maxima, exponentials and sums are taken for all of
// them at once, and none of them needs more than a few operations across a vector.
#pragma once

#include "attention.h"
#include "fetch.h"
#include "simd.h"

namespace {

using ellm::kDecodeStep;

// Query heads taken through the keys together: as many as a vector has lanes of four.
constexpr int kQueries = W / 4;

// Where scores are when NQ query heads go together. Heads get equal parts of a vector: fewer heads,
// more keys of each.
template <int NQ>
struct Places {
  static constexpr int heads = NQ == 3 ? 4 : NQ;
  static constexpr int keys = W / heads;  // of one head in one vector
  static constexpr int of(int key, int head) { return key / keys * W + head * keys + key % keys; }
};

// Scores of four keys, `sums` before their lanes are added, to scores[of(0..3, 0..NQ)].
template <int NQ>
INLINE void store_scores(float* scores, const vf (&sums)[NQ][4], float scale) {
  constexpr int kKeys = Places<NQ>::keys;
  vf quads[NQ];
#pragma GCC unroll 4
  for (int i = 0; i < NQ; ++i) quads[i] = add_quads(sums[i]);
#if W_FLOATS == 16
  if constexpr (NQ > 2) {
    const vf front = add_lanes(quads[0], quads[1]), back = add_lanes(quads[2], quads[NQ - 1]);
    return store(scores, add_lanes(front, back) * scale);
  } else if constexpr (NQ == 2) {
    const vf halves = add_lanes(quads[0], quads[1]);
    const vf both = (halves + exchange<4>(halves)) * scale;
    store_lane(scores, both);
    return store_lane(scores + kKeys, exchange<8>(both));
  }
  quads[0] += exchange<8>(quads[0]);
#elif W_FLOATS == 8
  if constexpr (NQ == 2) return store(scores, add_lanes(quads[0], quads[1]) * scale);
#endif
  if constexpr (W > 4) quads[0] += exchange<4 % W>(quads[0]);
  store_lane(scores, quads[0] * scale);
  static_assert(kKeys >= 4, "four keys of a head lie side by side");
}

// Rows of K or V of consecutive tokens, of one KV head.
struct Run {
  const char* const* rows;
  const char* const* next;  // rows that will be read some steps later, or null
  int count;                // rounded up to a multiple of four: rows beyond the last repeat it
  int64_t offset, bytes;    // of the head in a row
  ellm::Hint hint;

  template <class Bits>
  const Bits* at(const char* row) const {
    return reinterpret_cast<const Bits*>(row + offset);
  }

  // Asks for four of the next rows: where the next block lies, the prefetcher cannot know. A few
  // at a time, between pieces of arithmetic: more reads than the core can keep under way would
  // hold up everything after them.
  void fetch(int n) const {
    if (next == nullptr) return;
    for (int i = n; i < n + 4; ++i) fetch_lines(next[i] + offset, bytes, hint);
  }
};

// sums[i][n] = q[i] · k[n], lanes not added yet. Q: fp32, its elements where T::place says; of a
// type that `dots`, bf16 in order.
template <int NQ, class T>
INLINE void multiply_keys(const typename T::bits* const (&k)[4], const void* q, int head_dim,
                          vf (&sums)[NQ][4]) {
  constexpr int U = T::unit;
  for (int d = 0; d < head_dim; d += U * W) {
    if constexpr (T::dots) {
      vu key[4];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) key[n] = load_words(k[n] + d);
#pragma GCC unroll 4
      for (int i = 0; i < NQ; ++i) {
        const vu query = load_words(static_cast<const uint16_t*>(q) + i * head_dim + d);
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) sums[i][n] = T::add_dots(sums[i][n], query, key[n]);
      }
    } else {
      vf key[4][U];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) T::load_unit(k[n] + d, key[n]);
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u) {
#pragma GCC unroll 4
        for (int i = 0; i < NQ; ++i) {
          const vf query = load(static_cast<const float*>(q) + i * head_dim + d + u * W);
#pragma GCC unroll 4
          for (int n = 0; n < 4; ++n) sums[i][n] += query * key[n][u];
        }
      }
    }
  }
}

// Scores of a run of keys: q[i] · k[n] · scale.
template <int NQ, class T>
NOINLINE void score_keys(const Run run, const void* q, int head_dim, float scale, float* scores) {
  using bits = typename T::bits;
  for (int first = 0; first < run.count; first += 4) {
    run.fetch(first);
    const char* const* rows = run.rows + first;
    const bits* const k[4] = {run.at<bits>(rows[0]), run.at<bits>(rows[1]), run.at<bits>(rows[2]),
                              run.at<bits>(rows[3])};
    vf sums[NQ][4] = {};
    multiply_keys<NQ, T>(k, q, head_dim, sums);
    store_scores<NQ>(scores + Places<NQ>::of(first, 0), sums, scale);
  }
}

// Per vector of heads: running maxima and sums of weights (each head's at its own places), and
// what its sums so far are to be multiplied by.
struct Softmax {
  float *maximum, *total, *rescale;  // [W]
};

// The largest element among each head's, at all of its places.
template <int NQ>
INLINE vf largest_of_heads(vf x) {
  constexpr int kKeys = Places<NQ>::keys;
  x = larger(x, exchange<1>(x));
  x = larger(x, exchange<2>(x));
  if constexpr (kKeys > 4) x = larger(x, exchange<4 % W>(x));
  if constexpr (kKeys > 8) x = larger(x, exchange<8 % W>(x));
  return x;
}

// Scores of `count` keys to weights exp(score - maximum).
template <int NQ>
NOINLINE void weigh(float* scores, int count, const Softmax& softmax) {
  using P = Places<NQ>;
  for (int n = count; n % P::keys; ++n) {
    for (int i = 0; i < P::heads; ++i) scores[P::of(n, i)] = -__builtin_inff();
  }
  const int end = (count + P::keys - 1) / P::keys * W;
  const vf before = load(softmax.maximum);
  vf largest = before;
  for (int n = 0; n < end; n += W) largest = larger(load(scores + n), largest);
  largest = largest_of_heads<NQ>(largest);
  vf sum = {};
  for (int n = 0; n < end; n += W) {
    const vf weight = exponential(load(scores + n) - largest);
    store(scores + n, weight);
    sum += weight;
  }
  const vf rescale = exponential(before - largest);
  store(softmax.rescale, rescale);
  store(softmax.maximum, largest);
  store(softmax.total, load(softmax.total) * rescale + sum);
}

}  // namespace
