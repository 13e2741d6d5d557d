// The C interface that library.py loads through ctypes, which releases the GIL during a call.
#include <cstdint>
#include <vector>

#ifdef ELLM_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "attention.h"
#include "decoder.h"
#include "layer.h"
#include "plan.h"
#include "product.h"
#include "run.h"
#include "transfer.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace ellm {
namespace {

constexpr int kNone = -1;

const Kernels* const kTable[] = {
    &kPortable,
#ifdef ELLM_X86
    &kAvx2,
    &kAvx512,
    &kAvx512Bf16,
    &kAmx,
#endif
};

#ifdef ELLM_X86
// Whether the processor has AMX in bf16, and Linux lets this process use it, which has to be asked
// for once: its registers are large.
bool may_use_matrix_unit() {
#ifdef __linux__
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;  // of CPUID 7's EDX
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, its component
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (kBf16 | kTiles)) != 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

bool runs_here(int isa) {
#ifdef ELLM_X86
  __builtin_cpu_init();
  // F16C, which clang cannot be asked for, came before AVX2.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == 1) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (isa == 2) return avx512;
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (isa == 3) return avx512_bf16;
  if (isa == 4) return avx512_bf16 && may_use_matrix_unit();
#endif
  return isa == 0;
}

}  // namespace
}  // namespace ellm

using namespace ellm;

// What the sources were when this was built: library.py compares it with what they are.
EXPORT const char* ellm_sources() { return ELLM_SOURCES; }

// Name of the best instruction set for this head size among the first `most` + 1 (all if -1), and
// its index in *isa; null where there is none.
EXPORT const char* ellm_instruction_set(int most, int head_dim, int32_t* isa) {
  const int last = static_cast<int>(sizeof kTable / sizeof *kTable) - 1;
  for (int i = most < 0 || most > last ? last : most; i >= 0; --i) {
    if (runs_here(i) && head_dim % kTable[i]->width == 0) {
      *isa = i;
      return kTable[i]->name;
    }
  }
  *isa = kNone;
  return nullptr;
}

EXPORT std::vector<Plan>* ellm_make_plans(PlanArguments* arguments) {
  return make_plans(*arguments);
}

EXPORT void ellm_free_plans(std::vector<Plan>* plans) { delete plans; }

EXPORT void ellm_attend(const std::vector<Plan>* plans, int64_t group, const Call* call,
                        int64_t rows) {
  attend((*plans)[group], *call, rows, *kTable[call->isa]);
}

EXPORT void ellm_multiply(const Product* product) { multiply(*product, *kTable[product->isa]); }

EXPORT void ellm_normalise(const Norm* norm) { normalise(*norm, *kTable[norm->isa]); }

EXPORT bool ellm_rotate(const Rotation* rotation) {
  return rotate(*rotation, *kTable[rotation->isa]);
}

EXPORT void ellm_gate(const Gate* values) { gate(*values, *kTable[values->isa]); }

EXPORT bool ellm_decode(const Layer* layers, int64_t first, int64_t last, const Step* step) {
  return decode(layers, first, last, *step, kTable);
}

EXPORT void ellm_copy_units(char* to, const int64_t* to_units, const char* from,
                            const int64_t* from_units, int64_t count, int64_t unit_bytes,
                            int threads) {
  copy_units(to, to_units, from, from_units, count, unit_bytes, threads);
}

EXPORT Transfer* ellm_make_transfer() { return new Transfer; }

EXPORT void ellm_free_transfer(Transfer* transfer) { delete transfer; }

EXPORT void ellm_transfer_start(Transfer* transfer, const TransferArguments* arguments) {
  transfer->start(*arguments);
}

EXPORT double ellm_transfer_wait(Transfer* transfer, int64_t group) {
  return transfer->wait(group);
}

EXPORT void ellm_transfer_done(Transfer* transfer, int64_t group) { transfer->done(group); }

EXPORT void ellm_transfer_finish(Transfer* transfer) { transfer->finish(); }
