// A stack of decoder layers in one call: what their operators do one by one, to the bit.
#include "decoder.h"

#include "convert.h"
#include "layer.h"
#include "product.h"
#include "run.h"
#include "threads.h"

namespace ellm {
namespace {

class Running {
 public:
  Running(const Step& step, const Kernels* const* kernels) : step_(step), kernels_(kernels) {}

  void layer(Layer layer, bool is_first) const {
    if (is_first) {
      layer.input.x = step_.embedded;
      layer.input.residual = nullptr;
      layer.output.residual = step_.embedded;
    }
    const StepGroup& group = step_.groups[layer.group];
    const int64_t rows = group.rows, rows_after = layer.ends_group ? group.rows_after : rows;
    run(layer.input, rows);
    run(layer.qkv, rows);
    if (layer.query.weight) {
      heads(layer.query, layer.qkv, rows, layer.rotation.heads);
      heads(layer.key, layer.qkv, rows, layer.rotation.kv_heads);
    }
    layer.rotation.positions = step_.positions;
    layer.rotation.rows = rows;
    layer.rotation.threads = step_.threads;
    rotate(layer.rotation, of(layer.rotation.isa));
    layer.attention.out_rows = rows_after;
    layer.attention.threads = step_.threads;
    layer.attention.delta = step_.delta;
    attend((*group.plans)[group.index], layer.attention, rows, of(layer.attention.isa));
    run(layer.out, rows_after);
    run(layer.output, rows_after);
    if (!layer.gate_up.weight) return;
    run(layer.gate_up, rows_after);
    layer.gate.rows = rows_after;
    layer.gate.threads = step_.threads;
    gate(layer.gate, of(layer.gate.isa));
    run(layer.down, rows_after);
  }

 private:
  const Kernels& of(int32_t isa) const { return *kernels_[isa]; }

  void run(Product& product, int64_t rows) const {
    product.rows = rows;
    product.threads = step_.threads;
    product.hint = step_.hint;
    product.steps_ahead = step_.steps_ahead;
    multiply(product, of(product.isa));
  }

  void run(Norm& norm, int64_t rows) const {
    norm.rows = rows;
    norm.threads = step_.threads;
    normalise(norm, of(norm.isa));
  }

  // Norms of so many heads of each row: in `qkv`'s outputs they lie among the others.
  void heads(Norm norm, const Product& qkv, int64_t rows, int64_t count) const {
    norm.rows = count;
    norm.threads = step_.threads;
    normalise_heads(norm, rows, qkv.outputs, of(norm.isa));
  }

  const Step& step_;
  const Kernels* const* kernels_;
};

}  // namespace

bool decode(const Layer* layers, int64_t first, int64_t last, const Step& step,
            const Kernels* const* kernels) {
  Rotation rotation = layers[first].rotation;  // all have the same table
  rotation.positions = step.positions;
  rotation.rows = step.groups[layers[first].group].rows;
  if (!knows_positions(rotation)) return false;
  const CallsFollow of_this_step;
  const Running running(step, kernels);
  for (int64_t at = first; at < last; ++at) running.layer(layers[at], at == 0);
  return true;
}

}  // namespace ellm
