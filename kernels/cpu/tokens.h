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

// The steps of a part and, after them, those of what comes ahead: where their tokens are, from the
// step that is read to the one that is asked for meanwhile.
class StepsAhead {
 public:
  StepsAhead(const ellm::Call& call, const ellm::Part& part, const ellm::Part* ahead, int64_t bytes)
      : call_(call), rest_(part), ahead_(ahead), bytes_(bytes) {}

  // Goes on to the next step of the part; what is to be asked for during it, or null.
  const Tokens* advance() {
    ++now_;
    while (located_ <= now_ + call_.steps_ahead && locate_step()) ++located_;
    const bool fetches = call_.steps_ahead > 0 && located_ > now_ + call_.steps_ahead;
    return fetches ? &at(now_ + call_.steps_ahead) : nullptr;
  }

  const Tokens& now() { return at(now_); }

 private:
  Tokens& at(int64_t step) { return ring_[step % (ellm::kMostStepsAhead + 1)]; }

  bool locate_step() {
    if (rest_.begin >= rest_.end) {
      if (ahead_ == nullptr) return false;
      rest_ = *ahead_;
      ahead_ = nullptr;
    }
    const int64_t left = rest_.end - rest_.begin;
    const int count = left < ellm::kDecodeStep ? static_cast<int>(left) : ellm::kDecodeStep;
    locate(call_, *rest_.source, rest_.begin, count, bytes_, at(located_));
    rest_.begin += ellm::kDecodeStep;
    return true;
  }

  const ellm::Call& call_;
  ellm::Part rest_;          // not located yet
  const ellm::Part* ahead_;  // nor this, after it
  const int64_t bytes_;
  int64_t now_ = -1, located_ = 0;
  Tokens ring_[ellm::kMostStepsAhead + 1];
};

}  // namespace
