// What the plain translation units share: memory that stays with its thread, and rough speeds.
// Not for the vector units (see attention.h).
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace ellm {

// Rough speeds of one thread: only to compare work items and to choose a number of threads.
constexpr double kBytesPerMicrosecond = 10e3, kFlopsPerMicrosecond = 40e3;

enum class Use { kScratch, kPartials, kPrepared };

// Memory that stays with its thread from call to call; 64-byte aligned.
template <Use use>
float* thread_memory(int64_t floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local int64_t size = 0;
  if (floats > size) {
    const int64_t rounded = (floats + 15) / 16 * 16;
    memory.reset(static_cast<float*>(std::aligned_alloc(64, rounded * sizeof(float))));
    if (memory == nullptr) {
      std::fprintf(stderr, "eLLM: no memory for %lld floats\n", static_cast<long long>(rounded));
      std::abort();
    }
    size = rounded;
  }
  return memory.get();
}

}  // namespace ellm
