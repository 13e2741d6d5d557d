#pragma once

#include "attention.h"

namespace ellm {

// out = x · weightᵀ (+ bias).
void multiply(const Product& product, const Kernels& kernels);

}  // namespace ellm
