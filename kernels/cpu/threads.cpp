#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ellm {
namespace {

// How long the caller looks for the end of the others' last work items before it sleeps: some
// microseconds (20 on Zen 5), less than falling asleep and being woken costs.
constexpr int kLooks = 1000;
// And how long a worker looks for the next call where calls follow one another: what one thread
// does alone between two operators takes less.
constexpr int kLooksForCalls = 2000;
// Work for which it is worth to wake another thread, and to have one that is awake, in microseconds
// of one thread.
constexpr double kWorthWaking = 30, kWorthHaving = 10;

std::atomic<int> calls_follow{0};

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Workers {
 public:
  bool try_run(int threads, void (*work)(void*, int), void* context) {
    std::unique_lock<std::mutex> caller(caller_, std::try_to_lock);
    if (!caller) return false;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      try {
        const int most = std::min(threads, cpus_);
        for (; workers_ < most - 1; ++workers_) std::thread(&Workers::serve, this).detach();
      } catch (const std::system_error&) {  // there may be no more: those that there are do it all
      }
      work_ = work;
      context_ = context;
      next_ = 1;
      end_ = threads;
      calls_.fetch_add(1, std::memory_order_release);
    }
    if (threads > workers_) {
      wake_.notify_all();
    } else {
      for (int i = 1; i < threads; ++i) wake_.notify_one();
    }
    work(context, 0);
    {
      std::lock_guard<std::mutex> guard(mutex_);
      end_ = next_;  // whoever has not begun need not
    }
    for (int i = 0; i < kLooks && active_.load(std::memory_order_acquire) > 0; ++i) pause_briefly();
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return active_.load(std::memory_order_acquire) == 0; });
    return true;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (next_ >= end_) look_for_call(lock);
      wake_.wait(lock, [this] { return next_ < end_; });
      const int thread = next_++;
      active_.fetch_add(1, std::memory_order_relaxed);
      const auto work = work_;
      void* const context = context_;
      lock.unlock();
      work(context, thread);
      lock.lock();
      if (active_.fetch_sub(1, std::memory_order_release) == 1) idle_.notify_one();
    }
  }

  // Returns when there has been one, or it is time to sleep.
  void look_for_call(std::unique_lock<std::mutex>& lock) {
    const uint32_t seen = calls_.load(std::memory_order_relaxed);
    lock.unlock();
    for (int i = 0; i < kLooksForCalls && calls_follow.load(std::memory_order_relaxed) > 0 &&
                    calls_.load(std::memory_order_acquire) == seen;
         ++i) {
      pause_briefly();
    }
    lock.lock();
  }

  // CPUs that the caller may use, which its threads inherit: where OpenMP has bound it to one
  // (OMP_PROC_BIND), others would take turns with it there.
  static int usable_cpus() {
    cpu_set_t set;
    const bool known = sched_getaffinity(0, sizeof(set), &set) == 0;
    return known ? CPU_COUNT(&set) : 1 << 16;  // more than a set has
  }

  const int cpus_ = usable_cpus();
  std::mutex caller_;  // held by the thread whose work the workers do
  std::mutex mutex_;   // guards all below; `active_` and `calls_` may be read without it
  std::condition_variable wake_, idle_;
  void (*work_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int next_ = 0, end_ = 0;  // thread numbers still to be given out
  int workers_ = 0;
  std::atomic<int> active_{0};
  std::atomic<uint32_t> calls_{0};  // so far
};

std::atomic<Workers*> workers{nullptr};

// The child of a fork has none of the threads, and locks may be held by one of them: it begins
// with new workers and leaves the old ones' memory alone.
void forget_workers() {
  workers.store(nullptr);
  calls_follow.store(0);
}

Workers& the_workers() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_workers);
  (void)registered;
  Workers* current = workers.load();
  if (current == nullptr) {
    // Never deleted: the threads use it until the process ends.
    Workers* created = new Workers;
    if (workers.compare_exchange_strong(current, created)) return *created;
    delete created;
  }
  return *current;
}

}  // namespace

CallsFollow::CallsFollow() { calls_follow.fetch_add(1, std::memory_order_relaxed); }

CallsFollow::~CallsFollow() { calls_follow.fetch_sub(1, std::memory_order_relaxed); }

int useful_threads(int most, double microseconds) {
  const bool awake = calls_follow.load(std::memory_order_relaxed) > 0;
  const double worth = awake ? kWorthHaving : kWorthWaking;
  // Compared first: of a prompt of a million tokens it is more than an int holds.
  return std::max(1, static_cast<int>(std::min<double>(most, 1 + microseconds / worth)));
}

void run_on_threads(int threads, void (*work)(void*, int), void* context) {
  if (threads <= 1 || !the_workers().try_run(threads, work, context)) work(context, 0);
}

}  // namespace ellm
