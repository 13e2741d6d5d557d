// A pool of worker threads that sleep between calls.
#pragma once

namespace ellm {

// Runs work(context, 0) on the calling thread and work(context, i), 0 < i < threads, on as many
// workers as wake up in time; returns when all that began have ended. The calls must share the
// work among themselves (an atomic counter), so that none waits for a worker that the operating
// system did not let run. While another thread uses the workers, the caller works alone.
void run_on_threads(int threads, void (*work)(void*, int), void* context);

template <class F>
void run_on_threads(int threads, const F& work) {
  run_on_threads(
      threads, [](void* f, int thread) { (*static_cast<const F*>(f))(thread); },
      const_cast<F*>(&work));
}

}  // namespace ellm
