#pragma once

#include <cstdint>

#include "attention.h"
#include "plan.h"

namespace ellm {

// `rows`: rows of k and v. The caller has checked that every index is in range.
void attend(const Plan& plan, Call call, int64_t rows, const Kernels& kernels);

// Unit from_units[i] of `from` to unit to_units[i] of `to`, for all i.
void copy_units(char* to, const int64_t* to_units, const char* from, const int64_t* from_units,
                int64_t count, int64_t unit_bytes, int threads);

}  // namespace ellm
