// The matrix unit of x86 processors (AMX) in bf16. Its eight registers (Intel: tiles) hold matrices
// of 16 rows of 64 bytes, or of what `Shapes` says: sums [16, 16] in fp32, += a [16, 32] · b [32, 16]
// in bf16, where b is [16, 16, 2]: pairs of elements that are multiplied with neighbours of a row of
// a. Products are exact, each sum is rounded as a multiply-add of fp32 rounds it (subnormals count as
// 0).
#pragma once

#ifdef __AMX_BF16__
#include <cstdint>

#include "simd.h"

namespace {

constexpr int kSide = 16;                // rows of a register, and words of a row
constexpr int kPairs = 2 * kSide;        // bf16 elements of a row

// What the registers hold, as LDTILECFG reads it.
struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int number, int row_bytes_of) {
    rows[number] = kSide;
    row_bytes[number] = static_cast<uint16_t>(row_bytes_of);
  }
};

// Of all eight whole.
INLINE Shapes whole_registers() {
  Shapes shapes;
  for (int i = 0; i < 8; ++i) shapes.set(i, kSide * 4);
  return shapes;
}

// Of this thread, until `release_registers`, which whoever loaded shapes calls soon: what a thread
// has in them is saved whenever it loses the processor.
INLINE void load_shapes(const Shapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
INLINE void release_registers() { asm volatile("tilerelease"); }

// (g++'s own intrinsics take a register's number as a literal only, and do not say that they read
// memory.)
template <int kNumber>
INLINE void clear_register() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kNumber));
}

// Rows lie `stride` bytes apart.
template <int kNumber>
INLINE void load_register(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kNumber) : "memory");
}

template <int kNumber>
INLINE void store_register(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kNumber) : "memory");
}

template <int kSums, int kA, int kB>
INLINE void add_product() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(kB), "i"(kA), "i"(kSums));
}

// Of two vectors, words by turns from both: of each lane the first two, or the last two; pairs of
// words likewise; and the even lanes, or the odd ones, of both. (g++ warns of its own header's
// functions.)
INLINE vu first_words(vu a, vu b) {
  return SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
INLINE vu last_words(vu a, vu b) {
  return SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
INLINE vu first_pairs(vu a, vu b) {
  return SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
}
INLINE vu last_pairs(vu a, vu b) {
  return SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
INLINE vu even_lanes(vu a, vu b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
}
INLINE vu odd_lanes(vu a, vu b) {
  return SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// Words [16, 16] to their transpose. Strides are in words.
INLINE void transpose_words(const void* from, int64_t stride, uint32_t* to, int64_t to_stride) {
  vu a[kSide], b[kSide];
#pragma GCC unroll 16
  for (int i = 0; i < kSide; ++i) {
    a[i] = load_words(static_cast<const uint32_t*>(from) + i * stride);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kSide; i += 2) {
    b[i] = first_words(a[i], a[i + 1]);
    b[i + 1] = last_words(a[i], a[i + 1]);
  }
  // In lane L of a[4 i + j] then: column 4 L + j of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int i = 0; i < kSide; i += 4) {
    a[i] = first_pairs(b[i], b[i + 2]);
    a[i + 1] = last_pairs(b[i], b[i + 2]);
    a[i + 2] = first_pairs(b[i + 1], b[i + 3]);
    a[i + 3] = last_pairs(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const vu even = even_lanes(a[j], a[4 + j]), odd = odd_lanes(a[j], a[4 + j]);
    const vu more_even = even_lanes(a[8 + j], a[12 + j]), more_odd = odd_lanes(a[8 + j], a[12 + j]);
    store_words(to + j * to_stride, even_lanes(even, more_even));
    store_words(to + (4 + j) * to_stride, even_lanes(odd, more_odd));
    store_words(to + (8 + j) * to_stride, odd_lanes(even, more_even));
    store_words(to + (12 + j) * to_stride, odd_lanes(odd, more_odd));
  }
}

// Sixteen tokens' rows of K or V: where they are, if equally far apart.
struct TokenRows {
  const char* const* rows;
  int64_t stride;  // bytes; 0: they are not

  explicit TokenRows(const char* const* of) : rows(of), stride(of[1] - of[0]) {
    for (int n = 2; n < kSide; ++n) {
      if (of[n] - of[n - 1] != stride) stride = 0;
    }
  }

  // 32 elements of each, `offset` bytes from where its row begins.
  template <int kNumber>
  void load(int64_t offset) const {
    if (stride != 0) return load_register<kNumber>(rows[0] + offset, stride);
    uint16_t copy[kSide][kPairs];
    for (int n = 0; n < kSide; ++n) __builtin_memcpy(copy[n], rows[n] + offset, sizeof copy[n]);
    load_register<kNumber>(copy, sizeof copy[0]);
  }
};

// Multiplies a row of sums of attention: most of the time by 1, since maxima are whole numbers.
INLINE void rescale_sums(float* o, int head_dim, float by) {
  if (by == 1) return;
  for (int d = 0; d < head_dim; d += W) store(o + d, load(o + d) * by);
}

}  // namespace
#endif
