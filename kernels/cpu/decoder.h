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
  Product gate_up;        // without weight others go on from here, and write what `down` would
  Gate gate;
  Product down;
  int64_t group;          // its layer group
  int64_t ends_group;     // 1: its last layer; else 0
};

// A step in the layers of one group.
struct StepGroup {
  const std::vector<Plan>* plans;
  int64_t index;          // of its plan
  int64_t rows;           // in its layers; beyond the next group's they leave in the last one,
  int64_t rows_after;     // whose attention has their K and V, and returns nothing for them
};

// One step.
struct Step {
  const StepGroup* groups;
  const int64_t* positions;  // [rows of the first group]
  const void* embedded;      // [rows of the first group, hidden]: of the first layer
  int32_t threads;
  Hint hint;                 // of weights
  int32_t steps_ahead;
  float delta;               // as Call::delta
};

// Layers [first, last) of a stack. False, with nothing done: a position has no cosines.
bool decode(const Layer* layers, int64_t first, int64_t last, const Step& step,
            const Kernels* const* kernels);

}  // namespace ellm
