// A matrix product of few rows: parts of the outputs on all threads.
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
constexpr int64_t kOutputsAtOnce = 4;

}  // namespace

void multiply(const Product& product, const Kernels& kernels) {
  float* const prepared = thread_memory<Use::kPrepared>(kernels.product_floats(product) + 16);
  kernels.prepare(product, prepared);
  const int64_t row_bytes = product.size * size_of(product.type);
  const int64_t rows = std::max(int64_t{1}, kPartBytes / row_bytes / kOutputsAtOnce);
  const int64_t part = rows * kOutputsAtOnce;
  const double microseconds = std::max(
      product.outputs * row_bytes / kBytesPerMicrosecond,
      2.0 * product.rows * product.outputs * product.size / kFlopsPerMicrosecond);
  std::atomic<int64_t> next{0};
  run_on_threads(useful_threads(product.threads, microseconds), [&](int) {
    for (int64_t first; (first = next.fetch_add(part)) < product.outputs;) {
      kernels.multiply(product, prepared, first, std::min(first + part, product.outputs));
    }
  });
}

}  // namespace ellm
