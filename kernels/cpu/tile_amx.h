// K1 in bf16 by the matrix unit (amx.h): tile.h with its two products replaced. Scores and weights
// are as there, and rounded alike; sums are kept a column at a time, [kColumns, head_dim].
#pragma once

#ifdef __AMX_BF16__
#include "amx.h"
#include "fetch.h"
#include "tile.h"

namespace {

// Calls work(i, j) for the four sums of two matrices a and two b, constants both.
template <class F>
INLINE void for_two_by_two(const F& work) {
  work(Count<0>{}, Count<0>{});
  work(Count<0>{}, Count<1>{});
  work(Count<1>{}, Count<0>{});
  work(Count<1>{}, Count<1>{});
}

// Registers by number.
constexpr int sum_at(int i, int j) { return 2 * i + j; }
constexpr int a_at(int i) { return 4 + i; }
constexpr int b_at(int j) { return 6 + j; }

// Unscaled scores of 32 keys and 32 columns. `offset`: of the head in a row, bytes.
INLINE void score_by_unit(const TokenRows (&keys)[2], int64_t offset, const float* q, int head_dim,
                          float* scores) {
  for_two_by_two([](auto i, auto j) { clear_register<sum_at(i.value, j.value)>(); });
  for (int d = 0; d < head_dim; d += kPairs) {
    const float* const pairs = q + d / 2 * kColumns;
    keys[0].load<a_at(0)>(offset + d * 2);
    keys[1].load<a_at(1)>(offset + d * 2);
    load_register<b_at(0)>(pairs, kColumns * sizeof *q);
    load_register<b_at(1)>(pairs + kSide, kColumns * sizeof *q);
    for_two_by_two([](auto i, auto j) {
      add_product<sum_at(i.value, j.value), a_at(i.value), b_at(j.value)>();
    });
  }
  for_two_by_two([&](auto i, auto j) {
    store_register<sum_at(i.value, j.value)>(scores + (i.value * kColumns + j.value) * kSide,
                                             kColumns * sizeof *scores);
  });
}

// o[c] += Σ_n weights[c][n] v[n] of 32 columns c, and 32 dimensions. `weights`: pairs of tokens,
// [32, kKeys / 2]; `v`: [pairs, head_dim, 2].
INLINE void add_values(const uint32_t* weights, const float* v, int pairs, int head_dim, float* o) {
  const int64_t row = head_dim * sizeof *o;
  for_two_by_two([&](auto i, auto j) {
    load_register<sum_at(i.value, j.value)>(o + i.value * kSide * head_dim + j.value * kSide, row);
  });
  for (int n = 0; n < pairs; n += kSide) {
    load_register<a_at(0)>(weights + n, kKeys / 2 * sizeof *weights);
    load_register<a_at(1)>(weights + kSide * kKeys / 2 + n, kKeys / 2 * sizeof *weights);
    load_register<b_at(0)>(v + n * head_dim, row);
    load_register<b_at(1)>(v + n * head_dim + kSide, row);
    for_two_by_two([](auto i, auto j) {
      add_product<sum_at(i.value, j.value), a_at(i.value), b_at(j.value)>();
    });
  }
  for_two_by_two([&](auto i, auto j) {
    store_register<sum_at(i.value, j.value)>(o + i.value * kSide * head_dim + j.value * kSide, row);
  });
}

// Up to kKeys tokens, [first_key, ...). `weights`: [kColumns, kKeys / 2] words of memory.
INLINE void attend_by_unit(const Call& call, const TileColumns& of, const TileMemory& t,
                           const Tokens& tokens, int64_t first_key, uint32_t* weights) {
  const int head_dim = call.head_dim, count = tokens.count;
  const int64_t offset = int64_t{of.kv_head} * head_dim * 2;
  const float scale = scale_of<BFloat16Dots>(call.scale);
  for (int n = 0; n < count; n += 2 * kSide) {
    const TokenRows keys[2] = {TokenRows(tokens.k + n), TokenRows(tokens.k + n + kSide)};
    for (int c = 0; c < of.columns; c += 2 * kSide) {
      score_by_unit(keys, offset, t.q + c, head_dim, t.scores + n * kColumns + c);
    }
  }
  const bool masked = first_key + count - 1 > t.position[0];
  const int pairs = (count + kPairs - 1) / kPairs * kSide;  // the last ones are zeros
  for (int c = 0; c < of.columns; c += W) {
    float* const scores = t.scores + c;
    for (int n = 0; n < count; ++n) {
      store(scores + n * kColumns, load(scores + n * kColumns) * scale);
    }
    weigh_columns<BFloat16Dots>(t, c, first_key, count, masked);
    for (int n = (count + 1) / 2; n < pairs; ++n) store(scores + n * kColumns, vf{});
    for (int n = 0; n < pairs; n += kSide) {
      transpose_words(scores + n * kColumns, kColumns, weights + c * (kKeys / 2) + n, kKeys / 2);
    }
    for (int i = c; i < c + W; ++i) rescale_sums(t.o + i * head_dim, head_dim, t.rescale[i]);
  }
  for (int c = 0; c < of.columns; c += 2 * kSide) {
    for (int d = 0; d < head_dim; d += 2 * kSide) {
      add_values(weights + c * (kKeys / 2), t.v + d, pairs, head_dim, t.o + c * head_dim + d);
    }
  }
}

// Columns of an item: so many times kColumns, which share what is read of K and V.
constexpr int kShares = 4;

// Memory of all of them.
INLINE int64_t shared_floats(int head_dim) {
  return tile_floats(head_dim) + (kShares - 1) * own_floats(head_dim);
}

void tile_by_unit(const Call& call, const Source& source, const TileColumns& of, float* scratch) {
  const int head_dim = call.head_dim, shares = (of.columns + kColumns - 1) / kColumns;
  TileColumns columns[kShares];
  TileMemory memory[kShares];
  for (int i = 0; i < shares; ++i) {
    const int before = i * kColumns, left = of.columns - before;
    columns[i] = {of.row, of.position, of.kv_head, of.first + before,
                  left < kColumns ? left : kColumns};
    float* const own = scratch + tile_floats(head_dim) + (i - 1) * own_floats(head_dim);
    memory[i] = i == 0 ? divide(scratch, head_dim) : with_own(memory[0], own, head_dim);
    begin_tile<BFloat16Dots>(call, columns[i], memory[i]);
  }
  // K is read where it is: the place of its copy is free for the weights.
  static_assert(kColumns * kKeys / 2 <= 2 * W * kKeys, "head_dim is a multiple of 2 * W");
  auto* const weights = reinterpret_cast<uint32_t*>(memory[0].k);
  float* const v = memory[0].v;
  load_shapes(whole_registers());
  Tokens tokens;
  Words<BFloat16Dots> words;
  const auto end_of = [&](int i) { return memory[i].position[columns[i].columns - 1] + 1; };
  const int64_t end = end_of(shares - 1);
  for (int64_t from = 0; from < end; from += kKeys) {
    const int count = end - from < kKeys ? static_cast<int>(end - from) : kKeys;
    locate(call, source, from, count, sizeof(uint16_t), tokens);
    pair_words(tokens, of.kv_head, head_dim, v, words);
    const int pairs = (count + 1) / 2, padded = (count + kPairs - 1) / kPairs * kSide;
    for (int i = pairs * head_dim; i < padded * head_dim; i += W) store(v + i, vf{});
    for (int i = 0; i < shares; ++i) {
      if (from < end_of(i)) attend_by_unit(call, columns[i], memory[i], tokens, from, weights);
    }
  }
  release_registers();
  for (int i = 0; i < shares; ++i) finish_tile(call, columns[i], memory[i], 1, head_dim);
}

}  // namespace
#endif
