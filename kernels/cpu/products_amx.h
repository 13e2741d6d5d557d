// Matrix products of few rows in bf16 by the matrix unit (amx.h). As in products.h weights are read as
// they lie, and a row's outputs are the same to the bit whatever rows it shares the call with; but
// sixteen rows take little longer than one. Of a register's sums a row is an output, a column a row
// of x.
#pragma once

#ifdef __AMX_BF16__
#include "amx.h"
#include "attention.h"
#include "fetch.h"
#include "operators.h"
#include "simd.h"

namespace {

constexpr int kBlocks = 2;  // of 16 outputs at once: what is loaded of x is used twice
constexpr int kGroups = 2;  // of 16 rows of x at most, likewise
static_assert(ellm::kProductRows <= kGroups * kSide, "groups of rows");

// Registers by number: sums of block b and group g, weights of block b, x of group g.
constexpr int sums_of(int block, int group) { return kGroups * block + group; }
constexpr int weights_of_block(int block) { return 4 + block; }
constexpr int rows_at(int group) { return 6 + group; }

// Elements of a row of x, padded.
INLINE int64_t whole_pairs(int64_t size) { return (size + kPairs - 1) / kPairs * kPairs; }

INLINE int64_t rows_of_group(const Product& p, int group) {
  const int64_t left = p.rows - group * kSide;
  return left < kSide ? left : kSide;
}

INLINE Shapes shapes_of(const Product& p) {
  Shapes shapes = whole_registers();
  for (int group = 0; group * kSide < p.rows; ++group) {
    const int row_bytes = static_cast<int>(4 * rows_of_group(p, group));
    shapes.set(rows_at(group), row_bytes);
    for (int block = 0; block < kBlocks; ++block) shapes.set(sums_of(block, group), row_bytes);
  }
  return shapes;
}

// x, group by group: [pairs of elements, rows, 2], padded with zeros.
void prepare_pairs(const Product& p, float* prepared) {
  const int64_t pairs = whole_pairs(p.size) / 2, whole = p.size / kPairs * kSide;
  auto* to = reinterpret_cast<uint32_t*>(prepared);
  for (int group = 0; group * kSide < p.rows; ++group) {
    const int64_t rows = rows_of_group(p, group);
    const auto* const x = static_cast<const uint16_t*>(p.x) + group * kSide * p.x_stride;
    int64_t done = 0;
    if (rows == kSide && p.x_stride % 2 == 0) {
      for (; done < whole; done += kSide) {
        transpose_words(x + 2 * done, p.x_stride / 2, to + done * kSide, kSide);
      }
    }
    for (int64_t m = 0; m < rows; ++m) {
      const uint16_t* const row = x + m * p.x_stride;
      for (int64_t pair = done; pair < pairs; ++pair) {
        const int64_t left = p.size - 2 * pair;
        uint32_t word = 0;
        if (left > 1) {
          __builtin_memcpy(&word, row + 2 * pair, sizeof word);
        } else if (left == 1) {
          word = row[2 * pair];
        }
        to[pair * rows + m] = word;
      }
    }
    to += pairs * rows;
  }
}

// Weights of so many outputs and elements: what a register has room for.
template <int kNumber>
INLINE void load_weights(const uint16_t* from, int64_t size, int64_t outputs, int64_t elements) {
  if (outputs >= kSide && elements >= kPairs) {
    load_register<kNumber>(from, size * 2);
    return;
  }
  uint16_t padded[kSide][kPairs] = {};
  const int64_t bytes = 2 * (elements < kPairs ? elements : kPairs);
  for (int64_t n = 0; n < outputs && n < kSide; ++n) {
    __builtin_memcpy(padded[n], from + n * size, bytes);
  }
  load_register<kNumber>(padded, sizeof padded[0]);
}

// Calls work(block, group) for each block of outputs and group of rows, constants both.
template <int B, int G, class F>
INLINE void for_each_of(const F& work) {
  work(Count<0>{}, Count<0>{});
  if constexpr (G > 1) work(Count<0>{}, Count<1>{});
  if constexpr (B > 1) work(Count<1>{}, Count<0>{});
  if constexpr (B > 1 && G > 1) work(Count<1>{}, Count<1>{});
}

using Sums = float[kBlocks][kGroups][kSide][kSide];

// Of B blocks of outputs, `outputs` in all, whose weights begin at `w`, and G groups of rows.
template <int B, int G>
void multiply_blocks(const Product& p, const float* prepared, const uint16_t* w, int64_t outputs,
                     Sums& sums) {
  const int64_t first_rows = rows_of_group(p, 0), last_rows = rows_of_group(p, G - 1);
  const auto* const first = reinterpret_cast<const uint32_t*>(prepared);
  const auto* const last = first + whole_pairs(p.size) / 2 * first_rows;
  for_each_of<B, G>([](auto b, auto g) { clear_register<sums_of(b.value, g.value)>(); });
  for (int64_t d = 0; d < p.size; d += kPairs) {
    load_register<rows_at(0)>(first + d / 2 * first_rows, 4 * first_rows);
    if constexpr (G > 1) load_register<rows_at(1)>(last + d / 2 * last_rows, 4 * last_rows);
    load_weights<weights_of_block(0)>(w + d, p.size, outputs, p.size - d);
    if constexpr (B > 1) {
      load_weights<weights_of_block(1)>(w + kSide * p.size + d, p.size, outputs - kSide,
                                        p.size - d);
    }
    for_each_of<B, G>([](auto b, auto g) {
      add_product<sums_of(b.value, g.value), weights_of_block(b.value), rows_at(g.value)>();
    });
  }
  for_each_of<B, G>([&](auto b, auto g) {
    store_register<sums_of(b.value, g.value)>(sums[b.value][g.value], sizeof sums[0][0][0]);
  });
}

// Outputs from `n` on of all rows: a block's, as far as there are so many.
INLINE void store_block(const Product& p, int64_t n, int64_t outputs,
                        const float (&sums)[kGroups][kSide][kSide]) {
  static_assert(W == kSide, "a block's outputs of a row are a vector");
  const vi column = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int64_t count = outputs < W ? outputs : W;
  vf bias = {};
  if (p.bias != nullptr) {
    bias = load_part<BFloat16>(static_cast<const uint16_t*>(p.bias) + n, count);
  }
  for (int64_t m = 0; m < p.rows; ++m) {
    const float* const of_row = &sums[m / kSide][0][m % kSide];
    // (Without a mask g++ warns of its own header.)
    const vf sum = (vf)_mm512_mask_i32gather_ps(__m512{}, 0xffff, (__m512i)(column * kSide), of_row,
                                                sizeof(float));
    store_part<BFloat16>(static_cast<uint16_t*>(p.out) + m * p.outputs + n, sum + bias, count);
  }
}

// Outputs [first, last) of all rows.
void multiply_pairs(const Product& p, const float* prepared, int64_t first, int64_t last) {
  const auto* const weight = static_cast<const uint16_t*>(p.weight);
  alignas(64) Sums sums;
  load_shapes(shapes_of(p));
  for (int64_t n = first; n < last; n += kBlocks * kSide) {
    const uint16_t* const w = weight + n * p.size;
    const int64_t outputs = last - n;
    if (outputs > kSide) {
      p.rows > kSide ? multiply_blocks<2, 2>(p, prepared, w, outputs, sums)
                     : multiply_blocks<2, 1>(p, prepared, w, outputs, sums);
    } else {
      p.rows > kSide ? multiply_blocks<1, 2>(p, prepared, w, outputs, sums)
                     : multiply_blocks<1, 1>(p, prepared, w, outputs, sums);
    }
    for (int block = 0; block < kBlocks && block * kSide < outputs; ++block) {
      store_block(p, n + block * kSide, outputs - block * kSide, sums[block]);
    }
  }
  release_registers();
}

}  // namespace
#endif
