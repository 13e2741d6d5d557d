// K2 where every query head has a KV head of its own and KV is fp32: K, then V, are read in the one
// sequence in which they lie in memory, a token's row with all heads after the other. Where a row
// fills a page, as here, the prefetcher follows that better than four rows at a time (decode.h):
// the page is where it has to start anew.
#pragma once

#include "attention.h"
#include "fetch.h"
#include "simd.h"

namespace {

constexpr int64_t kPageBytes = 4096;

INLINE bool in_sequence(const ellm::Call& call, int64_t bytes) {
  return bytes == sizeof(float) && call.heads == call.kv_heads &&
         call.heads * call.head_dim * bytes >= kPageBytes;
}

// scores[h · stride] = q[h] · k[h] · scale, for all heads.
NOINLINE void score_row(const float* k, const float* q, int heads, int head_dim, float scale,
                        float* scores, int stride) {
  for (int first = 0; first < heads; first += 4) {
    const int some = heads - first < 4 ? heads - first : 4;
    vf sums[4] = {};
    for (int h = 0; h < some; ++h) {
      const int at = (first + h) * head_dim;
      vf sum = {};
      for (int d = at; d < at + head_dim; d += W) sum += load(q + d) * load(k + d);
      sums[h] = sum;
    }
    vf all = add_quads(sums);
#if W_FLOATS == 16
    all += exchange<8>(all);
#endif
    if constexpr (W > 4) all += exchange<4 % W>(all);
    all *= scale;
    for (int h = 0; h < some; ++h) scores[(first + h) * stride] = all[h];
  }
}

// o[h] += weights[h · stride] v[h], for all heads.
NOINLINE void add_row(const float* v, const float* weights, int heads, int head_dim, float* o,
                      int stride) {
  for (int h = 0; h < heads; ++h) {
    const vf weight = splat(weights[h * stride]);
    for (int d = h * head_dim; d < (h + 1) * head_dim; d += W) {
      store(o + d, load(o + d) + weight * load(v + d));
    }
  }
}

}  // namespace
