// Vectors of floats as wide as the instruction set this translation unit is compiled for.
// Compiler vector extensions (g++ and clang): one source, any instruction set.
#pragma once

#include <cstdint>
#ifdef __F16C__
#include <immintrin.h>
#endif

// Internal linkage throughout: no other instruction set's translation unit may pick these up.
#define INLINE static inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef float vf_unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t vh_unaligned __attribute__((vector_size(W * 2), aligned(2), may_alias));

INLINE vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
INLINE vi load_ints(const int32_t* p) { return *reinterpret_cast<const vi_unaligned*>(p); }
INLINE void store(float* p, vf x) { *reinterpret_cast<vf_unaligned*>(p) = x; }

INLINE vu load_halves(const uint16_t* p) {
  return __builtin_convertvector(*reinterpret_cast<const vh_unaligned*>(p), vu);
}

// Element types of the pool: `bits` is what memory holds.
struct Float32 {
  using bits = float;
  INLINE vf load_floats(const bits* p) { return load(p); }
};

struct BFloat16 {
  using bits = uint16_t;
  INLINE vf load_floats(const bits* p) { return (vf)(load_halves(p) << 16); }
};

struct Float16 {
  using bits = uint16_t;
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

INLINE vf larger(vf a, vf b) { return a > b ? a : b; }

INLINE float largest_of(vf x) {
  float best = x[0];
  for (int i = 1; i < W; ++i) best = best > x[i] ? best : x[i];
  return best;
}

INLINE float sum_of(vf x) {
  float sum = x[0];
  for (int i = 1; i < W; ++i) sum += x[i];
  return sum;
}

// exp(x) for x <= 0, to about one unit in the last place; 0 below -87, NaN stays NaN.
// Range reduction and polynomial as in Cephes' expf.
INLINE vf exp_nonpositive(vf x) {
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

// The four sums of add_quads' four vectors over all lanes, to p[0..4).
INLINE void store_quad(float* p, const vf x[4]) {
  typedef float quad __attribute__((vector_size(16)));
  typedef quad quad_unaligned __attribute__((aligned(4), may_alias));
  const vf lanes = add_quads(x);
  quad sum;
  __builtin_memcpy(&sum, &lanes, sizeof sum);
  for (int lane = 1; lane < W / 4; ++lane) {
    quad other;
    __builtin_memcpy(&other, reinterpret_cast<const char*>(&lanes) + lane * sizeof sum, sizeof sum);
    sum += other;
  }
  *reinterpret_cast<quad_unaligned*>(p) = sum;
}

}  // namespace
