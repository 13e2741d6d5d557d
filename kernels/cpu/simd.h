// Vectors of floats as wide as the instruction set this translation unit is compiled for.
// Compiler vector extensions (g++ and clang): one source, any instruction set.
#pragma once

#include <cstdint>
#ifdef __F16C__
#include <immintrin.h>
#endif

// Internal linkage throughout: no other instruction set's translation unit may pick these up.
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

namespace {

#if defined(__AVX512F__)
#define W_FLOATS 16
#elif defined(__AVX2__)
#define W_FLOATS 8
#else
#define W_FLOATS 4
#endif
constexpr int W = W_FLOATS;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef float vf_unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t vu_unaligned __attribute__((vector_size(W * 4), aligned(2), may_alias));
typedef uint16_t vh_unaligned __attribute__((vector_size(W * 2), aligned(2), may_alias));

INLINE vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
INLINE vi load_ints(const int32_t* p) { return *reinterpret_cast<const vi_unaligned*>(p); }
INLINE void store(float* p, vf x) { *reinterpret_cast<vf_unaligned*>(p) = x; }

INLINE vu load_words(const void* p) { return *reinterpret_cast<const vu_unaligned*>(p); }
INLINE uint32_t load_word(const void* p) {
  uint32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return word;
}
INLINE void store_words(void* p, vu x) { *reinterpret_cast<vu_unaligned*>(p) = x; }

INLINE void store_halves(uint16_t* p, vu x) {
  *reinterpret_cast<vh_unaligned*>(p) = __builtin_convertvector(x, vh_unaligned);
}
INLINE vu load_halves(const uint16_t* p) {
  return __builtin_convertvector(*reinterpret_cast<const vh_unaligned*>(p), vu);
}

// Element types of the pool: `bits` is what memory holds. `unit` vectors are loaded at once;
// element e of those unit · W goes to place(e). `dots`: Q and K are multiplied as they are.
struct Float32 {
  using bits = float;
  static constexpr int unit = 1;
  static constexpr bool dots = false;
  static constexpr int place(int e) { return e; }
  INLINE vf load_floats(const bits* p) { return load(p); }
  INLINE void load_unit(const bits* p, vf* x) { x[0] = load(p); }
};

struct BFloat16 {
  using bits = uint16_t;
  static constexpr int unit = 1;
  static constexpr bool dots = false;
  static constexpr int place(int e) { return e; }
  INLINE vf load_floats(const bits* p) { return (vf)(load_halves(p) << 16); }
  INLINE void load_unit(const bits* p, vf* x) { x[0] = load_floats(p); }
};

// The same, two vectors at once: first the elements with an even number, then the others. Half
// the loads, and no operation that widens.
struct BFloat16Pairs {
  using bits = uint16_t;
  static constexpr int unit = 2;
  static constexpr bool dots = false;
  static constexpr int place(int e) { return e % 2 * W + e / 2; }
  INLINE void load_unit(const bits* p, vf* x) {
    const vu both = load_words(p);
    x[0] = (vf)(both << 16);
    x[1] = (vf)(both & 0xffff0000u);
  }
};

#ifdef __AVX512BF16__
// Where Q is bf16 too: one instruction multiplies and adds pairs, exactly but for the rounding of
// each sum, as a multiply-add of fp32 rounds it (and subnormals count as 0). Weights are rounded
// to bf16, and multiply the values of two tokens at once, interleaved.
struct BFloat16Dots {
  using bits = uint16_t;
  static constexpr int unit = 2;
  static constexpr bool dots = true;
  static constexpr int place(int e) { return e / 4 % 2 * W + e / 8 * 4 + e % 4; }
  INLINE void interleave_unit(const bits* a, const bits* b, vu* x) {
    const auto first = (__m512i)load_words(a), second = (__m512i)load_words(b);
    x[0] = (vu)_mm512_unpacklo_epi16(first, second);
    x[1] = (vu)_mm512_unpackhi_epi16(first, second);
  }
  INLINE vf add_dots(vf sum, vu a, vu b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

struct Float16 {
  using bits = uint16_t;
  static constexpr int unit = 1;
  static constexpr bool dots = false;
  static constexpr int place(int e) { return e; }
  INLINE void load_unit(const bits* p, vf* x) { x[0] = load_floats(p); }
  INLINE vf load_floats(const bits* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    const vu h = load_halves(p), sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
    const vf finite = (vf)(rest << 13) * 0x1p112f;  // as half_to_float
    const vu special = 0x7f800000u | (rest << 13);
    const vu is_special = (vu)(rest >= 0x7c00u);
    return (vf)(sign | (is_special & special) | (~is_special & (vu)finite));
#endif
  }
};

INLINE vf splat(float x) { return x - vf{}; }
INLINE vu splat_word(uint32_t x) { return x - vu{}; }

INLINE vf larger(vf a, vf b) { return a > b ? a : b; }

constexpr float kMostExponent = 88;

// exp(x) for x <= kMostExponent, to about one unit in the last place; 0 below -87, NaN stays NaN.
// Range reduction and polynomial as in Cephes' expf.
INLINE vf exponential(vf x) {
  const float shift = 12582912.0f;  // 1.5 × 2^23: adding it rounds to an integer
  const vf shifted = x * 1.44269504088896341f + shift;
  const vf n = shifted - shift;
  const vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const vu result = (vu)p + ((vu)shifted << 23);  // may wrap, where the next line clears it
  return (vf)(result & ~(vu)(x < -87.0f));
}

// 2^x for x <= 0, to 3e-6 of it, and exactly where x is a whole number; 0 below -126, NaN stays NaN.
INLINE vf power_of_two(vf x) {
  const float shift = 12582912.0f;  // as above
  const vf shifted = x + shift;
  const vf r = x - (shifted - shift);
  vf p = r * 9.582576647e-3f + 5.590682995e-2f;
  p = p * r + 2.402410728e-1f;
  p = p * r + 6.931241184e-1f;
  p = p * r + 1.0f;
  const vu result = (vu)p + ((vu)shifted << 23);  // as above
  return (vf)(result & ~(vu)(x < -126.0f));
}

// The whole number from x up (|x| < 2^22).
INLINE vf round_up(vf x) {
  const float shift = 12582912.0f;
  const vf near = (x + shift) - shift;
  return near + (near < x ? splat(1.0f) : vf{});
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

// Sums of adjacent pairs, in each 128-bit lane: [a0+a1, a2+a3, b0+b1, b2+b3].
INLINE vf add_pairs(vf a, vf b) {
#if defined(__AVX512F__)
  return SHUFFLE(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         SHUFFLE(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#elif defined(__AVX2__)
  return SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
#else
  return SHUFFLE(a, b, 0, 2, 4, 6) + SHUFFLE(a, b, 1, 3, 5, 7);
#endif
}

// Four vectors to one: each 128-bit lane holds the four sums over that lane.
INLINE vf add_quads(const vf x[4]) {
  return add_pairs(add_pairs(x[0], x[1]), add_pairs(x[2], x[3]));
}

// Element i of the result is element i ^ M: neighbours, pairs, 128- or 256-bit halves change places.
template <int M>
INLINE vf exchange(vf x) {
#if defined(__AVX512F__)
  return SHUFFLE(x, x, 0 ^ M, 1 ^ M, 2 ^ M, 3 ^ M, 4 ^ M, 5 ^ M, 6 ^ M, 7 ^ M, 8 ^ M, 9 ^ M, 10 ^ M,
                 11 ^ M, 12 ^ M, 13 ^ M, 14 ^ M, 15 ^ M);
#elif defined(__AVX2__)
  return SHUFFLE(x, x, 0 ^ M, 1 ^ M, 2 ^ M, 3 ^ M, 4 ^ M, 5 ^ M, 6 ^ M, 7 ^ M);
#else
  return SHUFFLE(x, x, 0 ^ M, 1 ^ M, 2 ^ M, 3 ^ M);
#endif
}

#if W_FLOATS > 4
// Sums of adjacent lanes of 128 bits: [a0+a1, a2+a3, b0+b1, b2+b3], or [a0+a1, b0+b1].
INLINE vf add_lanes(vf a, vf b) {
#if defined(__AVX512F__)
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#else
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
#endif
}
#endif

// The first 128-bit lane of x to p[0..4).
INLINE void store_lane(float* p, vf x) { __builtin_memcpy(p, &x, 16); }

}  // namespace
