// Addresses of tokens' K and V, wherever they are. Included in each vector translation unit.
#pragma once

#include "attention.h"

namespace {

// Elements from the base of keys (or of the step's k) to each of `count` tokens from `begin` on.
struct Tokens {
  int count;
  const char* k[ellm::kKeys];
  const char* v[ellm::kKeys];
};

// Finds tokens [begin, begin + count). `bytes` is the size of a stored element. Entries beyond
// `count`, up to a multiple of kDecodeStep, repeat the last token: a kernel may read a few too many.
inline void locate(const ellm::Call& call, const ellm::Source& source, int64_t begin, int count,
                   int64_t bytes, Tokens& tokens) {
  tokens.count = count;
  const char *k = nullptr, *v = nullptr;
  int64_t k_step = 0, v_step = 0;
  int i = 0;
  while (i < count) {
    const int64_t position = begin + i;
    int64_t run;  // tokens at equal distances from here on
    int64_t row = -1;
    if (position >= source.boundary) {
      run = count - i;
      row = source.boundary_row + (position - source.boundary);
    } else {
      const int64_t block = position / call.block_tokens, offset = position % call.block_tokens;
      const int64_t entry = source.blocks[block];
      run = call.block_tokens - offset;
      if (run > source.boundary - position) run = source.boundary - position;
      if (entry < 0) {
        row = ~entry + offset;
      } else {
        const int64_t at = (entry * call.unit_stride + offset * call.token_stride) * bytes;
        k = static_cast<const char*>(call.keys) + at;
        v = static_cast<const char*>(call.values) + at;
        k_step = v_step = call.token_stride * bytes;
      }
    }
    if (row >= 0) {
      k = static_cast<const char*>(call.k) + row * call.k_stride * bytes;
      v = static_cast<const char*>(call.v) + row * call.v_stride * bytes;
      k_step = call.k_stride * bytes;
      v_step = call.v_stride * bytes;
    }
    const int end = run < count - i ? i + static_cast<int>(run) : count;
    for (; i < end; ++i, k += k_step, v += v_step) {
      tokens.k[i] = k;
      tokens.v[i] = v;
    }
  }
  for (; i % ellm::kDecodeStep != 0; ++i) {
    tokens.k[i] = tokens.k[count - 1];
    tokens.v[i] = tokens.v[count - 1];
  }
}

}  // namespace
