// A matrix product: parts of the outputs, of some rows at a time, on all threads.
#include "product.h"

#include <algorithm>
#include <atomic>

#include "convert.h"
#include "memory.h"
#include "threads.h"

namespace ellm {
namespace {

// Weights of one part: large enough to be read at full speed, small enough to share evenly.
constexpr int64_t kPartBytes = 128 << 10;

// Rows [first, first + kProductRows) of a product, as far as there are.
Product rows_of(const Product& product, int64_t first) {
  const int64_t bytes = size_of(product.type);
  Product some = product;
  some.rows = std::min<int64_t>(kProductRows, product.rows - first);
  some.x = static_cast<const char*>(product.x) + first * product.x_stride * bytes;
  some.out = static_cast<char*>(product.out) + first * product.outputs * bytes;
  return some;
}

}  // namespace

void multiply(const Product& product, const Kernels& kernels) {
  const int64_t groups = (product.rows + kProductRows - 1) / kProductRows;
  const int64_t floats = (kernels.product_floats(rows_of(product, 0)) + 15) / 16 * 16;
  float* const prepared = thread_memory<Use::kPrepared>(groups * floats);
  for (int64_t group = 0; group < groups; ++group) {
    kernels.prepare(rows_of(product, group * kProductRows), prepared + group * floats);
  }
  const int64_t row_bytes = product.size * size_of(product.type);
  const int64_t outputs = kernels.product_outputs(product);
  const int64_t part = outputs * std::max(int64_t{1}, kPartBytes / row_bytes / outputs);
  const double microseconds = std::max(
      product.outputs * row_bytes / kBytesPerMicrosecond,
      2.0 * product.rows * product.outputs * product.size / kFlopsPerMicrosecond);
  // All rows of a part follow one another: its weights are still in the cache.
  const int64_t items = (product.outputs + part - 1) / part * groups;
  std::atomic<int64_t> next{0};
  run_on_threads(useful_threads(product.threads, microseconds), [&](int) {
    for (int64_t item; (item = next.fetch_add(1)) < items;) {
      const int64_t first = item / groups * part, group = item % groups;
      kernels.multiply(rows_of(product, group * kProductRows), prepared + group * floats, first,
                       std::min(first + part, product.outputs));
    }
  });
}

}  // namespace ellm
