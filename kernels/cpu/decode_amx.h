// K2 in bf16 by the matrix unit (amx.h). K and V are read as they lie: sixteen tokens' rows, 32
// elements of each, are one operand, of scores with the pairs of q of the query heads that share
// them. For sums the other operand has each head's weights twice, once in the first and once in the
// second halves of words, the other halves zeros: one row of sums of the elements of V with an even
// number, one of the others (what is not finite in V spoils its neighbour, too). Scores lie by
// token, [tokens, heads], so that maxima, exponentials and sums are taken for sixteen heads at once
// without an operation across a vector.
#pragma once

#ifdef __AMX_BF16__
#include "amx.h"
#include "decode.h"

namespace {

constexpr int kMostHeads = kSide / 2;           // of a KV head, taken together
constexpr int kSixteens = kDecodeStep / kSide;  // sixteens of tokens in a step

// Heads that are taken together: all that share a KV head, or an equal part of them.
INLINE int heads_together(const Call& call) {
  const int group = call.heads / call.kv_heads;
  int together = group < kMostHeads ? group : kMostHeads;
  while (group % together != 0) --together;
  return together;
}

INLINE int padded_heads(const Call& call) { return (call.heads + W - 1) / W * W; }

// Scratch of one row.
struct UnitMemory {
  int padded;         // heads: a multiple of sixteen
  uint32_t* q;        // [head_dim / 2, heads]: pairs
  float* scores;      // [kDecodeStep, padded], then the weights
  uint32_t* weights;  // [padded, 2, kDecodeStep]
  float *maximum, *total, *rescale;  // [padded]

  INLINE UnitMemory of(const Call& call, float* scratch) {
    const int padded = padded_heads(call);
    float* const scores = scratch + int64_t{call.heads} * call.head_dim / 2;
    float* const weights = scores + padded * kDecodeStep;
    float* const maximum = weights + 2 * padded * kDecodeStep;
    return {padded, reinterpret_cast<uint32_t*>(scratch), scores,
            reinterpret_cast<uint32_t*>(weights), maximum, maximum + padded, maximum + 2 * padded};
  }
  INLINE int64_t floats(const Call& call) {
    const int64_t padded = padded_heads(call);
    return int64_t{call.heads} * call.head_dim / 2 + 3 * padded * (kDecodeStep + 1);
  }
};

// Shapes of both products: scores [tokens, heads] in 0 and 1, rows of K in 4 and 5, q in 7.
INLINE Shapes shapes_of_scores(int heads) {
  Shapes shapes = whole_registers();
  const int narrow[] = {0, 1, 7};
  for (const int number : narrow) shapes.set(number, heads * 4);
  return shapes;
}

// Sums [two rows of each head, pairs of elements] in 0 to 3, rows of V in 4 to 6, weights in 7.
INLINE Shapes shapes_of_sums(int heads) {
  Shapes shapes = whole_registers();
  const int low[] = {0, 1, 2, 3, 7};
  for (const int number : low) shapes.rows[number] = static_cast<uint8_t>(2 * heads);
  return shapes;
}

// Calls work(0) to work(kCount - 1), constants all.
template <int kCount, class F>
INLINE void for_each(const F& work) {
  work(Count<0>{});
  if constexpr (kCount > 1) work(Count<1>{});
  if constexpr (kCount > 2) work(Count<2>{});
  if constexpr (kCount > 3) work(Count<3>{});
}

// Rows of K or V that will be read later, asked for a register at a time.
struct TilesAhead {
  const char* const* rows;  // or null
  ellm::Hint hint;

  // Elements at `offset` bytes of sixteen rows from `first` on.
  void fetch(int first, int64_t offset) const {
    if (rows == nullptr) return;
    with_hint(hint, [&](auto ask) {
      for (int n = first; n < first + kSide; ++n) ask(rows[n] + offset);
    });
  }
};

// Unscaled scores of heads that go together, from `first` on. `offset`: of their KV head, bytes.
INLINE void score_heads(const Call& call, const UnitMemory& t, const TokenRows (&k)[kSixteens],
                        int64_t offset, int first, const TilesAhead& ahead) {
  const int64_t q_stride = call.heads * sizeof *t.q, stride = t.padded * sizeof *t.scores;
  for_each<kSixteens>([](auto j) { clear_register<j.value>(); });
  for (int d = 0; d < call.head_dim; d += kPairs) {
    load_register<7>(t.q + d / 2 * call.heads + first, q_stride);
    for_each<kSixteens>([&](auto j) {
      ahead.fetch(j.value * kSide, offset + d * 2);
      constexpr int kPlace = 4 + j.value;
      k[j.value].template load<kPlace>(offset + d * 2);
      add_product<j.value, kPlace, 7>();
    });
  }
  for_each<kSixteens>([&](auto j) {
    store_register<j.value>(t.scores + j.value * kSide * t.padded + first, stride);
  });
}

// o += sums of weights times V, of 32 · kCount elements of each head that goes together, [heads, 2,
// head_dim / 2]: those with an even number, then the others.
template <int kCount>
INLINE void add_heads(const UnitMemory& t, const TokenRows (&v)[kSixteens], int head_dim,
                      int64_t offset, int first, float* o, const TilesAhead& ahead) {
  const int64_t row = head_dim * 2;  // bytes of half a head's sums
  for_each<kCount>([&](auto j) { load_register<j.value>(o + j.value * kSide, row); });
  for (int b = 0; b < kSixteens; ++b) {
    load_register<7>(t.weights + 2 * first * kDecodeStep + b * kSide, kDecodeStep * 4);
    for_each<kCount>([&](auto j) {
      ahead.fetch(b * kSide, offset + j.value * kPairs * 2);
      v[b].load<4 + j.value % 3>(offset + j.value * kPairs * 2);
      add_product<j.value, 7, 4 + j.value % 3>();
    });
  }
  for_each<kCount>([&](auto j) { store_register<j.value>(o + j.value * kSide, row); });
}

// Unscaled scores of `count` tokens to weights, rounded as in `weigh`, in both rows of each head.
NOINLINE void weigh_heads(const Call& call, const UnitMemory& t, int count) {
  const vf scale = splat(scale_of<BFloat16Dots>(call.scale));
  for (int h = 0; h < t.padded; h += W) {
    float* const scores = t.scores + h;
    const vf before = load(t.maximum + h);
    vf largest = before, other = before;
    for (int n = 0; n < count; ++n) {
      const vf score = load(scores + n * t.padded) * scale;
      store(scores + n * t.padded, score);
      (n % 2 ? other : largest) = larger(score, n % 2 ? other : largest);
    }
    largest = round_up(larger(largest, other));
    vf sum = {};
    for (int n = 0; n < count; ++n) {
      const vf weight =
          (vf)round_to_bfloat(power_of_two(load(scores + n * t.padded) - largest));
      store(scores + n * t.padded, weight);
      sum += weight;
    }
    for (int n = count; n < kDecodeStep; ++n) store(scores + n * t.padded, vf{});
    const vf rescale = power_of_two(before - largest);
    store(t.rescale + h, rescale);
    store(t.maximum + h, largest);
    store(t.total + h, load(t.total + h) * rescale + sum);
    uint32_t* const weights = t.weights + 2 * h * kDecodeStep;
    for (int n = 0; n < kDecodeStep; n += kSide) {
      transpose_words(scores + n * t.padded, t.padded, weights + kDecodeStep + n, 2 * kDecodeStep);
    }
    for (int i = 0; i < W; ++i) {
      uint32_t* const own = weights + 2 * i * kDecodeStep;
      for (int n = 0; n < kDecodeStep; n += W) {
        store_words(own + n, load_words(own + kDecodeStep + n) >> 16);
      }
    }
  }
}

void attend_step(const Call& call, int together, const Shapes (&shapes)[2], const Tokens& tokens,
                 const Tokens* next, const UnitMemory& t, float* o) {
  const int head_dim = call.head_dim, group = call.heads / call.kv_heads;
  // Calls work(first head, offset of the KV head in a row, bytes; what is asked for meanwhile).
  const auto for_parts = [&](const char* const* ahead, const auto& work) {
    for (int h = 0; h < call.heads; h += together) {
      const bool leads = h % group == 0;  // of its KV head
      work(h, int64_t{h / group} * head_dim * 2, TilesAhead{leads ? ahead : nullptr, call.hint});
    }
  };
  load_shapes(shapes[0]);
  const TokenRows k[] = {TokenRows(tokens.k), TokenRows(tokens.k + kSide)};
  const auto* const keys = next != nullptr ? next->k : nullptr;
  for_parts(keys, [&](int h, int64_t offset, const TilesAhead& ahead) {
    score_heads(call, t, k, offset, h, ahead);
  });
  weigh_heads(call, t, tokens.count);
  for (int h = 0; h < call.heads; ++h) rescale_sums(o + h * head_dim, head_dim, t.rescale[h]);
  load_shapes(shapes[1]);
  const TokenRows v[] = {TokenRows(tokens.v), TokenRows(tokens.v + kSide)};
  const auto* const values = next != nullptr ? next->v : nullptr;
  for_parts(values, [&](int h, int64_t offset, const TilesAhead& ahead) {
    int d = 0;
    const auto add = [&](auto registers) {
      constexpr int kCount = decltype(registers)::value;
      for (; d + kCount * kPairs <= head_dim; d += kCount * kPairs) {
        add_heads<kCount>(t, v, head_dim, offset + d * 2, h, o + h * head_dim + d / 2, ahead);
      }
    };
    add(Count<4>{});
    add(Count<2>{});
    add(Count<1>{});
  });
}

void decode_by_unit(const Call& call, const Part& part, const Part* ahead, int64_t row,
                    float* scratch, float* o, float* m, float* l) {
  const int heads = call.heads, head_dim = call.head_dim, together = heads_together(call);
  const UnitMemory t = UnitMemory::of(call, scratch);
  const auto* const q = static_cast<const uint16_t*>(call.q) + row * call.q_stride;
  for (int h = 0; h < heads; ++h) {
    for (int d = 0; d < head_dim; d += 2) {
      __builtin_memcpy(t.q + d / 2 * heads + h, q + h * head_dim + d, 4);
    }
  }
  for (int64_t i = 0; i < int64_t{heads} * head_dim; ++i) o[i] = 0;
  for (int i = 0; i < t.padded * kDecodeStep; ++i) t.scores[i] = 0;
  for (int h = 0; h < t.padded; ++h) {
    t.maximum[h] = -__builtin_inff();
    t.total[h] = 0;
  }
  const Shapes shapes[2] = {shapes_of_scores(together), shapes_of_sums(together)};
  StepsAhead steps(call, part, ahead, sizeof(uint16_t));
  for (int64_t from = part.begin; from < part.end; from += kDecodeStep) {
    const Tokens* const next = steps.advance();
    attend_step(call, together, shapes, steps.now(), next, t, o);
  }
  release_registers();
  float* const sums = scratch;  // neither q nor scores are needed any more
  for (int h = 0; h < heads; ++h) {
    float* const own = o + h * head_dim;
    m[h] = t.maximum[h] / kLogarithmOfE;
    l[h] = t.total[h];
    __builtin_memcpy(sums, own, head_dim * sizeof *own);
    for (int d = 0; d < head_dim; ++d) own[d] = sums[d % 2 * (head_dim / 2) + d / 2];
  }
}

}  // namespace
#endif
