#pragma once

#include "attention.h"

namespace ellm {

// out = x · weight / sqrt(mean of x² + epsilon); where there is a residual, of x + residual, which
// goes to out_residual.
void normalise(const Norm& norm, const Kernels& kernels);
// The same for the heads of each of `rows` rows, which begin `stride` elements after one another in
// x and follow one another in the result; `norm` is of the first row's.
void normalise_heads(const Norm& norm, int64_t rows, int64_t stride, const Kernels& kernels);

// Whether there are cosines for all positions.
bool knows_positions(const Rotation& rotation);

// Turns q and k where they are. False, with nothing done: a position has no cosines.
bool rotate(const Rotation& rotation, const Kernels& kernels);

// out = silu(a) · b, silu(a) = a / (1 + exp(-a)), of the halves a, b of each row.
void gate(const Gate& gate, const Kernels& kernels);

}  // namespace ellm
