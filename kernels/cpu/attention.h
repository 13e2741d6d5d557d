// What the dispatching code (plain C++) and the vector code (compiled once per instruction set) share.
// Plain structs only: an inline function or template here would be compiled with AVX-512 in one
// translation unit and then be used by all of them.
#pragma once

#include <cstdint>

namespace ellm {

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Which caches a prefetch is to bring memory into: prefetcht0, t1, t2 and nta.
enum Hint : int32_t { kToL1 = 0, kToL2 = 1, kToL3 = 2, kOnce = 3 };

// Tokens whose KV is handled together. Boundaries are multiples of these positions, whatever the
// number of threads and wherever the KV comes from: sums keep their order, results their bits.
constexpr int kKeys = 64;          // keys between two updates of the running maximum, K1 ...
constexpr int kDecodeStep = 32;    // ... and K2
constexpr int kDecodeKeys = 512;   // keys of one work item of a decode row, or twice as many, ...
constexpr int kDecodeParts = 128;  // ... until the row has no more work items than these
constexpr int kColumns = 64;       // query rows × query heads of a tile; of a work item, or a multiple
constexpr int kProductRows = 32;   // of a matrix product, for which weights are read once
constexpr int kMostStepsAhead = 4; // of kDecodeStep tokens, between asking for KV and reading it

// One attention call. Strides are in elements of the tensor they belong to.
struct Call {
  const void* q;       // [rows, heads, head_dim]
  const void* k;       // [rows, kv_heads, head_dim]; once converted: of the pool's type
  const void* v;
  void* keys;          // [units, block_tokens, kv_heads, head_dim]
  void* values;
  void* out;           // [out_rows, heads, head_dim], contiguous
  int64_t q_stride, k_stride, v_stride;  // from row to row
  int64_t unit_stride, token_stride;     // of keys and of values
  int64_t out_rows;
  int32_t heads, kv_heads, head_dim, block_tokens;
  int32_t row_type;    // of q, k, v and out
  int32_t pool_type;   // of keys and values
  int32_t threads;
  int32_t isa;         // index into the table of instruction sets (api.cpp)
  Hint hint;           // K2 asks for KV with it ...
  int32_t steps_ahead; // ... so many steps before it reads it, at most kMostStepsAhead; 0: never
  float scale;
  float delta;         // share of the threads that begin with row ranges
};

// One matrix product: out = x · weightᵀ (+ bias). All of one type.
struct Product {
  const void* x;       // [rows, size]
  const void* weight;  // [outputs, size], contiguous
  const void* bias;    // [outputs], or null
  void* out;           // [rows, outputs], contiguous
  int64_t x_stride;    // elements from row to row
  int64_t rows, size, outputs;
  int32_t type;
  int32_t threads;
  int32_t isa;
  Hint hint;           // weights are asked for with it (not by a matrix unit) ...
  int32_t steps_ahead; // ... so many times four outputs before they are read; 0: never
};

// What lies between a layer's matrix products. All of one type; strides are in elements, from row
// to row.
struct Norm {
  const void* x;         // [rows, size], contiguous
  const void* residual;  // [rows, size], contiguous, or null
  const void* weight;    // [size]
  void* out;             // [rows, size]
  void* out_residual;    // [rows, size], where there is a residual
  int64_t rows, size;
  float epsilon;
  int32_t type, threads, isa;
};

struct Rotation {
  void* q;                   // [rows, heads, head_dim]
  void* k;                   // [rows, kv_heads, head_dim]
  const void* cosines;       // [known_positions, turned]: cosines, then sines
  const int64_t* positions;  // [rows]
  int64_t q_stride, k_stride, rows, known_positions;
  int32_t heads, kv_heads, head_dim;
  int32_t turned;            // the first elements of each head, an even number
  int32_t type, threads, isa;
};

struct Gate {
  const void* x;  // [rows, 2, size], contiguous
  void* out;      // [rows, size]
  int64_t rows, size;
  int32_t type, threads, isa;
};

// Where the KV of one request's tokens is.
struct Source {
  const int64_t* blocks;  // per token block: its unit, or ~r: its first token would be row r
  int64_t boundary;       // tokens from here on are rows of the step ...
  int64_t boundary_row;   // ... beginning with this one
};

// Tokens [begin, end) of one request.
struct Part {
  const Source* source;
  int64_t begin, end;
};

// One instruction set's kernels. `scratch` is 64-byte aligned, `scratch_floats` long.
struct Kernels {
  const char* name;
  int width;  // head_dim must be a multiple of it

  int64_t (*scratch_floats)(const Call&);

  // All heads of row `row` over `tokens`: unnormalised sums o [heads, head_dim], maxima m [heads]
  // and sums of weights l [heads]. `ahead`: what the thread will probably read next, or null.
  void (*decode)(const Call&, const Part& tokens, const Part* ahead, int64_t row, float* scratch,
                 float* o, float* m, float* l);

  // Most columns of one call of `tile`, kColumns or a multiple of it.
  int (*tile_columns)(const Call&);

  // Columns [first, first + columns) of rows row, row + 1, ... at positions position, ...;
  // column c is row c / group, head c % group of the heads that share `kv_head`. Writes `out`.
  void (*tile)(const Call&, const Source&, int64_t row, int64_t position, int kv_head,
               int64_t first, int columns, float* scratch);

  // Matrix products: rows of x as `multiply` wants them, product_floats(...) long; and outputs
  // [first, last) of all rows, best a multiple of product_outputs(...).
  int64_t (*product_outputs)(const Product&);
  int64_t (*product_floats)(const Product&);
  void (*prepare)(const Product&, float* prepared);
  void (*multiply)(const Product&, const float* prepared, int64_t first, int64_t last);

  // Rows [first, last).
  void (*normalise)(const Norm&, int64_t first, int64_t last);
  void (*rotate)(const Rotation&, int64_t first, int64_t last);
  void (*gate)(const Gate&, int64_t first, int64_t last);
};

extern const Kernels kPortable;
#ifdef ELLM_X86
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;
extern const Kernels kAmx;
#endif

}  // namespace ellm
