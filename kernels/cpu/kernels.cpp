// The vector kernels, compiled once per instruction set; ELLM_KERNELS names the table.
#include "decode.h"
#include "decode_amx.h"
#include "operators.h"
#include "products.h"
#include "products_amx.h"
#include "tile.h"
#include "tile_amx.h"

namespace {

#ifdef __AVX512BF16__
// Of both kernels, which then round weights alike.
bool dots(const Call& call) {
  return call.pool_type == ellm::kBFloat16 && call.row_type == ellm::kBFloat16 &&
         call.head_dim % (2 * W) == 0;
}
#endif

int64_t scratch_floats(const Call& call) {
  int64_t decode = RowMemory::floats(call), tile = tile_floats(call.head_dim);
#ifdef __AMX_BF16__
  if (dots(call)) {
    decode = UnitMemory::floats(call);
    tile = shared_floats(call.head_dim);
  }
#endif
  return decode > tile ? decode : tile;
}

int tile_columns([[maybe_unused]] const Call& call) {
#ifdef __AMX_BF16__
  if (dots(call)) return kShares * kColumns;
#endif
  return kColumns;
}

void decode(const Call& call, const Part& tokens, const Part* ahead, int64_t row, float* scratch,
            float* o, float* m, float* l) {
#if defined(__AMX_BF16__)
  if (dots(call)) return decode_by_unit(call, tokens, ahead, row, scratch, o, m, l);
#elif defined(__AVX512BF16__)
  if (dots(call)) return decode_as<BFloat16Dots>(call, tokens, ahead, row, scratch, o, m, l);
#endif
  switch (call.pool_type) {
    case ellm::kFloat32:
      return decode_as<Float32>(call, tokens, ahead, row, scratch, o, m, l);
    case ellm::kBFloat16:
      // With one query head per KV head memory is the limit, and shorter loads were 15 % faster.
      if (call.heads == call.kv_heads || call.head_dim % (2 * W) != 0) {
        return decode_as<BFloat16>(call, tokens, ahead, row, scratch, o, m, l);
      }
      return decode_as<BFloat16Pairs>(call, tokens, ahead, row, scratch, o, m, l);
    default:
      return decode_as<Float16>(call, tokens, ahead, row, scratch, o, m, l);
  }
}

void tile(const Call& call, const Source& source, int64_t row, int64_t position, int kv_head,
          int64_t first, int columns, float* scratch) {
  const TileColumns of{row, position, kv_head, first, columns};
#if defined(__AMX_BF16__)
  if (dots(call)) return tile_by_unit(call, source, of, scratch);
#elif defined(__AVX512BF16__)
  if (dots(call)) return tile_as<BFloat16Dots>(call, source, of, scratch);
#endif
  switch (call.pool_type) {
    case ellm::kFloat32: return tile_as<Float32>(call, source, of, scratch);
    case ellm::kBFloat16: return tile_as<BFloat16>(call, source, of, scratch);
    default: return tile_as<Float16>(call, source, of, scratch);
  }
}

// Calls work(T{}) for the type T of an operator's elements.
template <class F>
void with_plain_type(int32_t type, const F& work) {
  if (type == ellm::kFloat32) return work(Float32{});
  if (type == ellm::kBFloat16) return work(BFloat16{});
  work(Float16{});
}

void normalise(const Norm& norm, int64_t first, int64_t last) {
  with_plain_type(norm.type, [&](auto type) { normalise_as<decltype(type)>(norm, first, last); });
}

void rotate(const Rotation& rotation, int64_t first, int64_t last) {
  with_plain_type(rotation.type,
                  [&](auto type) { rotate_as<decltype(type)>(rotation, first, last); });
}

void gate(const Gate& gate, int64_t first, int64_t last) {
  with_plain_type(gate.type, [&](auto type) { gate_as<decltype(type)>(gate, first, last); });
}

// How products are done: products.h ...
template <class T>
struct ByVectors {
  static int64_t outputs() { return kOutputs; }
  static int64_t floats(const Product& p) { return p.rows * padded<T>(p.size); }
  static void prepare(const Product& p, float* to) { prepare_as<T>(p, to); }
  static void multiply(const Product& p, const float* prepared, int64_t first, int64_t last) {
    multiply_as<T>(p, prepared, first, last);
  }
};

#ifdef __AMX_BF16__
// ... and products_amx.h.
struct ByUnit {
  static int64_t outputs() { return kBlocks * kSide; }
  static int64_t floats(const Product& p) { return p.rows * whole_pairs(p.size) / 2; }
  static void prepare(const Product& p, float* to) { prepare_pairs(p, to); }
  static void multiply(const Product& p, const float* prepared, int64_t first, int64_t last) {
    multiply_pairs(p, prepared, first, last);
  }
};
#endif

// What work(how) returns, `how` being one of these, by the type of a product's elements.
template <class F>
auto with_method(const Product& product, const F& work) {
  if (product.type == ellm::kFloat32) return work(ByVectors<Float32>{});
  if (product.type == ellm::kFloat16) return work(ByVectors<Float16>{});
#if defined(__AMX_BF16__)
  return work(ByUnit{});
#elif defined(__AVX512BF16__)
  return work(ByVectors<BFloat16Dots>{});
#else
  return work(ByVectors<BFloat16Pairs>{});
#endif
}

int64_t product_outputs(const Product& product) {
  return with_method(product, [](auto how) { return how.outputs(); });
}

int64_t product_floats(const Product& product) {
  return with_method(product, [&](auto how) { return how.floats(product); });
}

void prepare(const Product& product, float* prepared) {
  with_method(product, [&](auto how) { how.prepare(product, prepared); });
}

void multiply(const Product& product, const float* prepared, int64_t first, int64_t last) {
  with_method(product, [&](auto how) { how.multiply(product, prepared, first, last); });
}

}  // namespace

namespace ellm {
extern const Kernels ELLM_KERNELS = {
    ELLM_NAME, W, scratch_floats, decode, tile_columns, tile,
    product_outputs, product_floats, prepare, multiply, normalise, rotate, gate};
}
