// Asking for memory before it is read. Which hint and what distance are best differs from processor
// to processor (Zen 4 halves a decode row's time with one hint and not with another): the caller
// says both, prefetch.py measures them.
#pragma once

#include "attention.h"
#include "simd.h"

namespace {

template <int N>
struct Count {
  static constexpr int value = N;
};

// Asks for the cache lines of [from, from + bytes).
INLINE void fetch_lines(const char* from, int64_t bytes, ellm::Hint hint) {
  const auto fetch = [&](auto locality) {
    for (int64_t at = 0; at < bytes; at += 64) {
      __builtin_prefetch(from + at, 0, decltype(locality)::value);
    }
  };
  switch (hint) {
    case ellm::kToL1: return fetch(Count<3>{});
    case ellm::kToL2: return fetch(Count<2>{});
    case ellm::kToL3: return fetch(Count<1>{});
    case ellm::kOnce: return fetch(Count<0>{});
  }
}

}  // namespace
