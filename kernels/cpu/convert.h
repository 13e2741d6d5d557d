// Scalar conversions between fp32, bf16 and fp16: round to nearest, ties to even.
// `static`: every translation unit keeps its own copy, compiled for its own instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace ellm {

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

static inline float bfloat_to_float(uint16_t h) { return float_of(uint32_t{h} << 16); }

static inline uint16_t float_to_bfloat(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  // 2^112 moves the exponent's bias from 15 to 127 and makes subnormals normal.
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
}

static inline uint16_t float_to_half(float x) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (rest < 0x38800000u) {  // subnormal: let the addition do the rounding
    const float shifted = float_of(rest) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(shifted) - bits_of(0.5f)));
  }
  const uint32_t rounded = rest + 0xfffu + ((rest >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

static inline int64_t size_of(int32_t type) { return type == 0 ? 4 : 2; }

static inline float load_as_float(const void* base, int64_t i, int32_t type) {
  if (type == 0) return static_cast<const float*>(base)[i];
  const uint16_t h = static_cast<const uint16_t*>(base)[i];
  return type == 1 ? bfloat_to_float(h) : half_to_float(h);
}

static inline void store_float(void* base, int64_t i, int32_t type, float x) {
  if (type == 0) {
    static_cast<float*>(base)[i] = x;
  } else {
    static_cast<uint16_t*>(base)[i] = type == 1 ? float_to_bfloat(x) : float_to_half(x);
  }
}

}  // namespace ellm
