// A pool of worker threads that sleep between steps, and how many of them work is worth.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace ellm {

// Runs work(context, 0) on the calling thread and work(context, i), 0 < i < threads, on as many
// workers as wake up in time; returns when all that began have ended. The calls must share the
// work among themselves (an atomic counter), so that none waits for a worker that the operating
// system did not let run. While another thread uses the workers, the caller works alone.
void run_on_threads(int threads, void (*work)(void*, int), void* context);

// While there is one of these, workers look for the next call for some microseconds before they
// sleep: calls follow one another, and a worker that has to be woken comes late.
class CallsFollow {
 public:
  CallsFollow();
  ~CallsFollow();
  CallsFollow(const CallsFollow&) = delete;
  CallsFollow& operator=(const CallsFollow&) = delete;
};

// How many threads, at most `most`, work of so many microseconds of one is worth.
int useful_threads(int most, double microseconds);

template <class F>
void run_on_threads(int threads, const F& work) {
  run_on_threads(
      threads, [](void* f, int thread) { (*static_cast<const F*>(f))(thread); },
      const_cast<F*>(&work));
}

// Calls work(begin, end) for parts of [0, count), on several threads where `microseconds` of one
// are worth it.
template <class F>
void split(int threads, int64_t count, int64_t part, double microseconds, const F& work) {
  std::atomic<int64_t> next{0};
  const int64_t parts = (count + part - 1) / part;
  const auto most = static_cast<int>(std::min<int64_t>(threads, parts));
  run_on_threads(useful_threads(most, microseconds), [&](int) {
    for (int64_t begin; (begin = next.fetch_add(part)) < count;) {
      work(begin, std::min(begin + part, count));
    }
  });
}

}  // namespace ellm
