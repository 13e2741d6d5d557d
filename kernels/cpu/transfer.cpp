#include "transfer.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>

namespace ellm {

Transfer::~Transfer() {
  finish();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Transfer::start(const TransferArguments& a) {
  finish();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const int64_t count = a.groups > 0 ? a.ends[a.groups - 1] : 0;
    to_ = a.to;
    from_ = a.from;
    to_units_.assign(a.to_units, a.to_units + count);
    from_units_.assign(a.from_units, a.from_units + count);
    ends_.assign(a.ends, a.ends + a.groups);
    states_.assign(a.groups, kPending);
    unit_bytes_ = a.unit_bytes;
    slots_ = a.slots;
    next_ = 0;
    open_ = std::min(a.slots, a.groups);
    try {
      if (open_ > 0 && !thread_.joinable()) thread_ = std::thread(&Transfer::serve, this);
    } catch (const std::system_error&) {  // there may be no more: `wait` copies
    }
  }
  wake_.notify_one();
}

double Transfer::wait(int64_t group) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (states_[group] == kArrived) return 0.0;
  const auto began = std::chrono::steady_clock::now();
  if (states_[group] == kPending) {
    copy(group, lock);
  } else {
    arrived_.wait(lock, [&] { return states_[group] == kArrived; });
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

void Transfer::done(int64_t group) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    open_ = std::min<int64_t>(group + 1 + slots_, states_.size());
    if (next_ >= open_) return;
  }
  wake_.notify_one();
}

void Transfer::finish() {
  std::unique_lock<std::mutex> lock(mutex_);
  open_ = 0;
  arrived_.wait(lock, [this] { return under_way_ == 0; });
}

void Transfer::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || next_ < open_; });
    if (stop_) return;
    const int64_t group = next_++;
    if (states_[group] == kPending) copy(group, lock);
  }
}

// Called with the lock, which is open while the group's units are copied.
void Transfer::copy(int64_t group, std::unique_lock<std::mutex>& lock) {
  states_[group] = kClaimed;
  ++under_way_;
  lock.unlock();
  for (int64_t i = group > 0 ? ends_[group - 1] : 0; i < ends_[group]; ++i) {
    std::memcpy(to_ + to_units_[i] * unit_bytes_, from_ + from_units_[i] * unit_bytes_,
                unit_bytes_);
  }
  lock.lock();
  states_[group] = kArrived;
  --under_way_;
  arrived_.notify_all();
}

}  // namespace ellm
