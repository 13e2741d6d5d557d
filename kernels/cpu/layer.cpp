// Operators between a layer's matrix products: rows on as many threads as they are worth.
#include "layer.h"

#include <algorithm>

#include "convert.h"
#include "threads.h"

namespace ellm {
namespace {

constexpr int64_t kPart = 16;  // rows at most
// Rough speed of one thread: elements per microsecond of a row that is in cache.
constexpr double kElementsPerMicrosecond = 2e3;

// Calls work(begin, end) for parts of `rows` rows of so many elements: one for each thread that they
// are worth, if there are few.
template <class F>
void split_rows(int threads, int64_t rows, int64_t elements, const F& work) {
  const double microseconds = rows * elements / kElementsPerMicrosecond;
  const int useful = useful_threads(threads, microseconds);
  const int64_t part = std::clamp<int64_t>((rows + useful - 1) / useful, 1, kPart);
  split(useful, rows, part, microseconds, work);
}

}  // namespace

void normalise_heads(const Norm& norm, int64_t rows, int64_t stride, const Kernels& kernels) {
  const int64_t bytes = norm.size * size_of(norm.type);
  split_rows(norm.threads, rows, norm.rows * norm.size, [&](int64_t begin, int64_t end) {
    Norm of_row = norm;
    for (int64_t row = begin; row < end; ++row) {
      of_row.x = static_cast<const char*>(norm.x) + row * stride * size_of(norm.type);
      of_row.out = static_cast<char*>(norm.out) + row * norm.rows * bytes;
      kernels.normalise(of_row, 0, norm.rows);
    }
  });
}

void normalise(const Norm& norm, const Kernels& kernels) {
  split_rows(norm.threads, norm.rows, norm.size, [&](int64_t begin, int64_t end) {
    kernels.normalise(norm, begin, end);
  });
}

bool knows_positions(const Rotation& rotation) {
  const int64_t* const positions = rotation.positions;
  const auto known = [&](int64_t at) { return at >= 0 && at < rotation.known_positions; };
  return std::all_of(positions, positions + rotation.rows, known);
}

bool rotate(const Rotation& rotation, const Kernels& kernels) {
  if (!knows_positions(rotation)) return false;
  const int64_t elements = (rotation.heads + rotation.kv_heads) * rotation.turned;
  split_rows(rotation.threads, rotation.rows, elements, [&](int64_t begin, int64_t end) {
    kernels.rotate(rotation, begin, end);
  });
  return true;
}

void gate(const Gate& gate, const Kernels& kernels) {
  split_rows(gate.threads, gate.rows, gate.size, [&](int64_t begin, int64_t end) {
    kernels.gate(gate, begin, end);
  });
}

}  // namespace ellm
