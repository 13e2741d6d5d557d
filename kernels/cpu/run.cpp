// One attention call: KV of the step's rows to the pool, then all work items on all threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "attention.h"
#include "convert.h"
#include "memory.h"
#include "plan.h"
#include "run.h"
#include "threads.h"

namespace ellm {
namespace {

constexpr int64_t kRowsOfPart = 64;  // converted, or written, by one thread at once

// Converts `rows` rows of k and v to the pool's type; afterwards `call` describes the copies.
void convert_rows(Call& call, int64_t rows, std::vector<char>& copies) {
  const int64_t width = int64_t{call.kv_heads} * call.head_dim, bytes = size_of(call.pool_type);
  copies.resize(2 * rows * width * bytes);
  const void* from[2] = {call.k, call.v};
  const int64_t strides[2] = {call.k_stride, call.v_stride};
  split(call.threads, rows, kRowsOfPart, 2.0 * rows * width / 1e3, [&](int64_t begin, int64_t end) {
    for (int which = 0; which < 2; ++which) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t i = 0; i < width; ++i) {
          store_float(copies.data(), (which * rows + row) * width + i, call.pool_type,
                      load_as_float(from[which], row * strides[which] + i, call.row_type));
        }
      }
    }
  });
  call.k = copies.data();
  call.v = copies.data() + rows * width * bytes;
  call.k_stride = call.v_stride = width;
}

void write_rows(const Call& call, const Plan& plan) {
  const int64_t bytes = size_of(call.pool_type);
  const int64_t width = int64_t{call.kv_heads} * call.head_dim * bytes;
  const int64_t writes = static_cast<int64_t>(plan.write_rows.size());
  const double microseconds = 4.0 * writes * width / kBytesPerMicrosecond;
  split(call.threads, writes, kRowsOfPart, microseconds, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = plan.write_rows[i];
      const int64_t to = (plan.write_units[i] * call.unit_stride +
                          plan.write_offsets[i] * call.token_stride) * bytes;
      std::memcpy(static_cast<char*>(call.keys) + to,
                  static_cast<const char*>(call.k) + row * call.k_stride * bytes, width);
      std::memcpy(static_cast<char*>(call.values) + to,
                  static_cast<const char*>(call.v) + row * call.v_stride * bytes, width);
    }
  });
}

constexpr int64_t kItemsOfThread = 4;  // of K1

struct TileItem {  // K1
  const Range* range;
  int kv_head;
  int64_t first;
  int columns;
  int64_t keys;
};

struct DecodeItem {  // K2
  int row;           // index into `Work::rows`
  int64_t begin, end;
};

struct DecodeRow {
  const Range* range;
  int parts;            // work items this row's keys are split into ...
  int64_t part_keys;    // ... and keys of each but the last
  int64_t first_part;   // of the partial results, where there are several
};

// A row of so many parts is merged when all are there, its heads shared by the threads.
constexpr int kMergedByHead = 16;

// Depends on the row alone, so that its sums keep their order.
int64_t keys_of_part(int64_t keys) {
  int64_t part = kDecodeKeys;
  while (part * kDecodeParts < keys) part *= 2;
  return part;
}

// Everything one call has to do, and what has been done.
class Work {
 public:
  Work(const Call& call, const Plan& plan, const Kernels& kernels)
      : call_(call), plan_(plan), kernels_(kernels) {
    for (const Range& range : plan.ranges) {
      if (range.row >= call.out_rows) continue;
      if (range.count == 1) {
        add_row(range);
      } else {
        add_tiles(range);
      }
    }
    // Longest first: what is left at the end is short.
    std::sort(tiles_.begin(), tiles_.end(),
              [](const TileItem& a, const TileItem& b) { return a.keys > b.keys; });
    partials_ = thread_memory<Use::kPartials>(parts_ * part_floats());
    unfinished_.reset(new std::atomic<int>[rows_.size()]);
    for (size_t i = 0; i < rows_.size(); ++i) unfinished_[i] = rows_[i].parts;
  }

  void run() {
    const int threads = useful_threads(call_.threads, microseconds_);
    const int on_tiles = static_cast<int>(std::lround(call_.delta * threads));
    run_on_threads(threads, [&](int thread) {
      const int64_t decode_floats = part_floats() + 16;
      float* result = thread_memory<Use::kScratch>(decode_floats + kernels_.scratch_floats(call_) + 16);
      float* scratch = result + (decode_floats + 15) / 16 * 16;
      if (thread < on_tiles) {
        run_tiles(scratch);
        run_decodes(scratch, result);
      } else {
        run_decodes(scratch, result);
        run_tiles(scratch);
      }
    });
    for (const DecodeRow& row : rows_) {
      if (row.parts >= kMergedByHead) merge_by_head(row);
    }
  }

 private:
  // A partial result: sums of all heads, their maxima, their totals.
  int64_t part_floats() const { return int64_t{call_.heads} * (call_.head_dim + 2); }

  void add_row(const Range& range) {
    const int64_t keys = range.position + 1;
    const int64_t part_keys = keys_of_part(keys);
    const int parts = static_cast<int>((keys + part_keys - 1) / part_keys);
    const int row = static_cast<int>(rows_.size());
    rows_.push_back({&range, parts, part_keys, parts_});
    if (parts > 1) parts_ += parts;
    for (int64_t begin = 0; begin < keys; begin += part_keys) {
      decodes_.push_back({row, begin, std::min(begin + part_keys, keys)});
    }
    microseconds_ += 2.0 * keys * call_.kv_heads * call_.head_dim * size_of(call_.pool_type) /
                     kBytesPerMicrosecond;
  }

  void add_tiles(const Range& range) {
    const int64_t group = call_.heads / call_.kv_heads, all = range.count * group;
    int64_t most = kernels_.tile_columns(call_);
    // Work for all threads comes before reading K and V for more columns at once.
    const int64_t items = kItemsOfThread * call_.threads;
    while (most > kColumns && all * call_.kv_heads < items * most) most /= 2;
    for (int64_t first = 0; first < all; first += most) {
      const int columns = static_cast<int>(std::min(most, all - first));
      const int64_t keys = range.position + (first + columns - 1) / group + 1;
      for (int kv_head = 0; kv_head < call_.kv_heads; ++kv_head) {
        tiles_.push_back({&range, kv_head, first, columns, keys});
      }
      microseconds_ += 4.0 * columns * keys * call_.heads / group * call_.head_dim /
                       kFlopsPerMicrosecond;
    }
  }

  void run_tiles(float* scratch) {
    for (size_t i; (i = next_tile_.fetch_add(1)) < tiles_.size();) {
      const TileItem& item = tiles_[i];
      kernels_.tile(call_, plan_.sources[item.range->request], item.range->row,
                    item.range->position, item.kv_head, item.first, item.columns, scratch);
    }
  }

  void run_decodes(float* scratch, float* result) {
    for (size_t i; (i = next_decode_.fetch_add(1)) < decodes_.size();) {
      const DecodeItem& item = decodes_[i];
      const DecodeRow& row = rows_[item.row];
      const Range& range = *row.range;
      float* part = result;
      if (row.parts > 1) {
        part = partials_ + (row.first_part + item.begin / row.part_keys) * part_floats();
      }
      float* maxima = part + int64_t{call_.heads} * call_.head_dim;
      const size_t next = next_decode_.load(std::memory_order_relaxed);
      const bool more = next < decodes_.size();
      const Part tokens = part_of(item), ahead = part_of(decodes_[more ? next : i]);
      kernels_.decode(call_, tokens, more ? &ahead : nullptr, range.row, scratch, part, maxima,
                      maxima + call_.heads);
      if (row.parts == 1) {
        finish(range.row, part, 1, result);
      } else if (row.parts < kMergedByHead &&
                 unfinished_[item.row].fetch_sub(1, std::memory_order_acq_rel) == 1) {
        finish(range.row, parts_of(row), row.parts, result);
      }
    }
  }

  const float* parts_of(const DecodeRow& row) const {
    return partials_ + row.first_part * part_floats();
  }

  void merge_by_head(const DecodeRow& row) const {
    const double microseconds = 4.0 * row.parts * part_floats() / kBytesPerMicrosecond;
    split(call_.threads, call_.heads, 1, microseconds, [&](int64_t head, int64_t) {
      float* const sum = thread_memory<Use::kScratch>(call_.head_dim);
      finish_head(row.range->row, head, parts_of(row), row.parts, sum);
    });
  }

  Part part_of(const DecodeItem& item) const {
    return {&plan_.sources[rows_[item.row].range->request], item.begin, item.end};
  }

  // Merges a row's partial results, in order (log-sum-exp), and writes the row.
  // `sum` has room for a head; it may be `parts` itself.
  void finish(int64_t row, const float* parts, int count, float* sum) const {
    for (int64_t h = 0; h < call_.heads; ++h) {
      finish_head(row, h, parts, count, count == 1 ? sum + h * call_.head_dim : sum);
    }
  }

  void finish_head(int64_t row, int64_t h, const float* parts, int count, float* o) const {
    const int64_t heads = call_.heads, head_dim = call_.head_dim;
    const float* maxima = parts + heads * head_dim + h;
    float maximum = maxima[0];
    for (int i = 1; i < count; ++i) maximum = std::max(maximum, maxima[i * part_floats()]);
    float total = 0;
    for (int i = 0; i < count; ++i) {
      const float* part = parts + i * part_floats() + h * head_dim;
      const float weight = std::exp(maxima[i * part_floats()] - maximum);
      total += weight * maxima[i * part_floats() + heads];
      if (count == 1) break;  // `o` is the part
      for (int64_t d = 0; d < head_dim; ++d) o[d] = (i > 0 ? o[d] : 0) + weight * part[d];
    }
    const float factor = 1 / total;
    for (int64_t d = 0; d < head_dim; ++d) {
      store_float(call_.out, (row * heads + h) * head_dim + d, call_.row_type, o[d] * factor);
    }
  }

  const Call& call_;
  const Plan& plan_;
  const Kernels& kernels_;
  std::vector<TileItem> tiles_;
  std::vector<DecodeItem> decodes_;
  std::vector<DecodeRow> rows_;
  int64_t parts_ = 0;
  double microseconds_ = 0;
  float* partials_ = nullptr;
  std::unique_ptr<std::atomic<int>[]> unfinished_;
  std::atomic<size_t> next_tile_{0}, next_decode_{0};
};

}  // namespace

void attend(const Plan& plan, Call call, int64_t rows, const Kernels& kernels) {
  thread_local std::vector<char> copies;
  if (call.row_type != call.pool_type) convert_rows(call, rows, copies);
  write_rows(call, plan);
  Work(call, plan, kernels).run();
}

namespace {

#ifdef __SSE2__
// Past the caches, which a copy of many units would only empty; and memcpy takes ten times as long
// on some processors where both ends lie alike in their pages, as units do (Zen: rep movsb).
void copy_unit(char* to, const char* from, int64_t bytes) {
  constexpr int64_t kLine = 64, kPart = sizeof(__m128i);
  const auto ends = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) |
                    static_cast<uintptr_t>(bytes);
  if (ends % kLine != 0) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (int64_t at = 0; at < bytes; at += kPart) {
    const auto part = _mm_load_si128(reinterpret_cast<const __m128i*>(from + at));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), part);
  }
}

// Before others are told that the units are there.
void finish_copies() { _mm_sfence(); }
#else
void copy_unit(char* to, const char* from, int64_t bytes) { std::memcpy(to, from, bytes); }

void finish_copies() {}
#endif

}  // namespace

void copy_units(char* to, const int64_t* to_units, const char* from, const int64_t* from_units,
                int64_t count, int64_t unit_bytes, int threads) {
  std::atomic<int64_t> next{0};
  run_on_threads(threads, [&](int) {
    for (int64_t i; (i = next.fetch_add(1)) < count;) {
      copy_unit(to + to_units[i] * unit_bytes, from + from_units[i] * unit_bytes, unit_bytes);
    }
    finish_copies();
  });
}

}  // namespace ellm
