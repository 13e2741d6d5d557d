// Copies a step's units from the host tier, layer group by layer group, while layers compute.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace ellm {

// A step's units in the order in which they are needed: group g has those from ends[g - 1] up to
// ends[g]. Python owns the arrays; they are copied.
struct TransferArguments {
  char* to;
  const char* from;
  const int64_t* to_units;
  const int64_t* from_units;
  const int64_t* ends;
  int64_t groups, unit_bytes;
  int64_t slots;  // groups ahead of those that are done; 0: a group is copied when it is waited for
};

// One thread that copies ahead, and sleeps otherwise. Whoever waits for a group that it has not
// begun copies that group himself: on a busy machine nobody waits for a thread to be woken.
class Transfer {
 public:
  ~Transfer();
  void start(const TransferArguments& arguments);
  // Returns when the group has been copied. Seconds that the caller spent on it.
  double wait(int64_t group);
  // Its layers have used the group's units: the slot may be written over.
  void done(int64_t group);
  // What nobody has begun is dropped, what is under way is waited for.
  void finish();

 private:
  enum State : char { kPending, kClaimed, kArrived };

  void serve();
  void copy(int64_t group, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;  // guards all below; a claimed group's part of the lists is only read
  std::condition_variable wake_, arrived_;
  std::thread thread_;
  bool stop_ = false;
  char* to_ = nullptr;
  const char* from_ = nullptr;
  std::vector<int64_t> to_units_, from_units_, ends_;
  std::vector<State> states_;
  int64_t unit_bytes_ = 0, slots_ = 0;
  int64_t next_ = 0;       // the thread looks at this group next
  int64_t open_ = 0;       // and at none from this one on
  int64_t under_way_ = 0;  // groups that are claimed
};

}  // namespace ellm
