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

constexpr int64_t kLine = 64;

// Calls work(ask), where ask(address) asks for a cache line with this hint.
template <class F>
INLINE void with_hint(ellm::Hint hint, const F& work) {
  switch (hint) {
    case ellm::kToL1: return work([](const char* at) { __builtin_prefetch(at, 0, 3); });
    case ellm::kToL2: return work([](const char* at) { __builtin_prefetch(at, 0, 2); });
    case ellm::kToL3: return work([](const char* at) { __builtin_prefetch(at, 0, 1); });
    case ellm::kOnce: return work([](const char* at) { __builtin_prefetch(at, 0, 0); });
  }
}

// Asks for the cache lines of [from, from + bytes).
INLINE void fetch_lines(const char* from, int64_t bytes, ellm::Hint hint) {
  with_hint(hint, [&](auto ask) {
    for (int64_t at = 0; at < bytes; at += kLine) ask(from + at);
  });
}

}  // namespace
