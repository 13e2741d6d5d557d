#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "plan.h"

namespace ellm {

// One decoder layer: every operator as if it were called by itself, on buffers that all layers
// share. Rows, and what depends on the step, are filled in by `decode`.
struct Layer {
  Norm input;             // of the residual stream
  Product qkv;
  Norm query, key;        // of each head; without weight there are none
  Rotation rotation;
  Call attention;
  Product out;
  Norm output;
  Product gate_up;
  Gate gate;
  Product down;
  int64_t group;          // its plan's
};

// One step.
struct Step {
  const std::vector<Plan>* plans;
  const int64_t* positions;  // [rows]
  const void* embedded;      // [rows, hidden]: of the first layer
  int64_t rows;
  int32_t threads;
  Hint hint;                 // of weights
  int32_t steps_ahead;
  float delta;               // as Call::delta
};

// Layers [first, last) of a stack. False, with nothing done: a position has no cosines.
bool decode(const Layer* layers, int64_t first, int64_t last, const Step& step,
            const Kernels* const* kernels);

}  // namespace ellm
