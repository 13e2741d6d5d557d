// The scores of a decode row, and the weights they become. A vector of scores holds four keys of
// several query heads of one KV head, so that maxima, exponentials and sums are taken for all of
// them at once, and none of them needs more than a few operations across a vector.
#pragma once

#include <type_traits>

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

// Rows of K or V that will be read later, asked for in the order in which they lie in memory, as
// many bytes as are read meanwhile, a few lines at a time between pieces of arithmetic. A core
// drops what it is asked for beyond what it can keep under way, so that each row is asked for
// twice: some steps before it is read, and again soon before.
class RowsAhead {
 public:
  // `later`: or null, for nothing at all; `soon`: what was `later` before.
  RowsAhead(const char* const* later, const char* const* soon, int64_t row_bytes, ellm::Hint hint)
      : later_(later), soon_(soon), row_bytes_(row_bytes), hint_(hint) {}

  void fetch(int64_t bytes) {
    if (later_ == nullptr) return;
    with_hint(hint_, [&](auto ask) {
      if (bytes > kAtOnce) return by_line(bytes, ask);
      for (int64_t span; bytes > 0; bytes -= span) {
        const char *const later = *later_ + at_, *const soon = *soon_ + at_;
        span = bytes < row_bytes_ - at_ ? bytes : row_bytes_ - at_;
        for (int64_t line = 0; line < span; line += kLine) {
          ask(later + line);
          ask(soon + line);
        }
        advance(span);
      }
    });
  }

 private:
  // As fast as they can be asked for, more lines are too many at once: from memory, rows of 2 KB
  // then take 1.3 times as long. What each line costs here is the pace.
  static constexpr int64_t kAtOnce = 8 * kLine;

  template <class F>
  void by_line(int64_t bytes, const F& ask) {
    for (; bytes > 0; bytes -= kLine) {
      ask(*later_ + at_);
      ask(*soon_ + at_);
      advance(kLine);
    }
  }

  void advance(int64_t bytes) {
    at_ += bytes;
    if (at_ < row_bytes_) return;
    at_ = 0;
    ++later_;
    ++soon_;
  }

  const char *const *later_, *const *soon_;
  const int64_t row_bytes_;
  const ellm::Hint hint_;
  int64_t at_ = 0;
};

// Rows of K or V of consecutive tokens, of one KV head.
struct Run {
  const char* const* rows;
  int count;         // rounded up to a multiple of four: rows beyond the last repeat it
  int64_t offset;    // of the head in a row
  RowsAhead* ahead;  // or null

  template <class Bits>
  struct Four {
    const Bits* rows[4];
  };
  template <class Bits>
  Four<Bits> four(int n) const {
    const auto at = [&](int i) { return reinterpret_cast<const Bits*>(rows[n + i] + offset); };
    return {{at(0), at(1), at(2), at(3)}};
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
INLINE void score_keys(const Run run, const void* q, int head_dim, float scale, float* scores) {
  for (int first = 0; first < run.count; first += 4) {
    if (run.ahead != nullptr) run.ahead->fetch(4 * head_dim * sizeof(typename T::bits));
    vf sums[NQ][4] = {};
    multiply_keys<NQ, T>(run.four<typename T::bits>(first).rows, q, head_dim, sums);
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

// What a weight is stored as.
template <class T>
using WeightOf = std::conditional_t<T::dots, uint16_t, float>;

constexpr float kLogarithmOfE = 1.44269504088896341f;  // to base 2

// What scores are multiplied by. Weights of a type that `dots` are powers of two (below).
template <class T>
INLINE float scale_of(float scale) {
  return T::dots ? scale * kLogarithmOfE : scale;
}

// Weights rounded to bf16 (to nearest), in the upper halves of words.
INLINE vu round_to_bfloat(vf weights) { return ((vu)weights + 0x8000u) & 0xffff0000u; }

// Scores of `count` keys to weights exp(score - maximum).
//
// Of a type that `dots`, weights are rounded to bf16, and lie where the scores' first halves were.
// Each maximum is a whole number there, and weights are powers of two: with another maximum they
// have another exponent and the same digits, so that a row's weights are rounded alike wherever
// its keys are divided, here and in K1.
template <int NQ, class T>
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
  if constexpr (T::dots) largest = round_up(largest);
  vf sum = {};
  for (int n = 0; n < end; n += W) {
    vf weight;
    if constexpr (T::dots) {
      const vu rounded = round_to_bfloat(power_of_two(load(scores + n) - largest));
      store_halves(reinterpret_cast<uint16_t*>(scores) + n, rounded >> 16);
      weight = (vf)rounded;
    } else {
      weight = exponential(load(scores + n) - largest);
      store(scores + n, weight);
    }
    sum += weight;
  }
  const vf rescale = T::dots ? power_of_two(before - largest) : exponential(before - largest);
  store(softmax.rescale, rescale);
  store(softmax.maximum, largest);
  store(softmax.total, load(softmax.total) * rescale + sum);
}

}  // namespace
