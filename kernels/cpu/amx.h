// The matrix unit of x86 processors (AMX) in bf16. Its eight registers (Intel: tiles) hold matrices of 16
// rows of 64 bytes, or of what `Shapes` says: sums [16, 16] in fp32, += a [16, 32] · b [32, 16] in bf16,
// where b is [16, 16, 2]: pairs of elements that are multiplied with neighbours of a row of a.
// Products are exact, each sum is rounded as a multiply-add of fp32 rounds it (subnormals count as 0).
#pragma once

#ifdef __AMX_BF16__
#include <immintrin.h>

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

// Of this thread, until `release_registers`, which whoever loaded shapes calls soon: what a thread has in
// them is saved whenever it loses the processor.
INLINE void load_shapes(const Shapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
INLINE void release_registers() { asm volatile("tilerelease"); }

// (g++'s own intrinsics take a register's number as a literal only, and do not say that they read memory.)
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

// Words [16, 16] to their transpose. Strides are in words.
INLINE void transpose_words(const void* from, int64_t stride, uint32_t* to, int64_t to_stride) {
  __m512i a[kSide], b[kSide];
#pragma GCC unroll 16
  for (int i = 0; i < kSide; ++i) {
    a[i] = _mm512_loadu_si512(static_cast<const uint32_t*>(from) + i * stride);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kSide; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  // In lane L of a[4 i + j] then: column 4 L + j of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int i = 0; i < kSide; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  constexpr int kEvenLanes = 0x88, kOddLanes = 0xdd;
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i even = _mm512_shuffle_i32x4(a[j], a[4 + j], kEvenLanes),
                  odd = _mm512_shuffle_i32x4(a[j], a[4 + j], kOddLanes),
                  more_even = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], kEvenLanes),
                  more_odd = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], kOddLanes);
    const auto put = [&](int column, __m512i x) { _mm512_storeu_si512(to + column * to_stride, x); };
    put(j, _mm512_shuffle_i32x4(even, more_even, kEvenLanes));
    put(4 + j, _mm512_shuffle_i32x4(odd, more_odd, kEvenLanes));
    put(8 + j, _mm512_shuffle_i32x4(even, more_even, kOddLanes));
    put(12 + j, _mm512_shuffle_i32x4(odd, more_odd, kOddLanes));
  }
}

}  // namespace
#endif
