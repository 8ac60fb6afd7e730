// Gated activations, their gradients, and the layouts of their two halves.
#pragma once

#include <moire/context.h>
#include <moire/groups.h>
#include <moire/tensor.h>

namespace moire {

// How gate and up lie along 2F rows: see moire_glu_layout. Shapes cannot tell layouts apart, so
// this travels with the tensor.
struct GluLayout : moire_glu_layout {
  GluLayout() : moire_glu_layout{} {}
  GluLayout(const moire_glu_layout& layout) : moire_glu_layout(layout) {}
  static GluLayout halves() { return {}; }
  static GluLayout interleaved(int64_t block, int32_t order = MOIRE_GATE_FIRST) {
    return moire_glu_layout{block, order};
  }
  static GluLayout ungated() { return moire_glu_layout{0, MOIRE_UNGATED}; }
};

struct Activation : moire_activation {
  Activation() : moire_activation{} {}
  Activation(const moire_activation& a) : moire_activation(a) {}
  static Activation swiglu() { return {}; }
  static Activation clamped_swiglu(float limit = 7.0F, float alpha = 1.702F, float offset = 1.0F) {
    return moire_activation{MOIRE_CLAMPED_SWIGLU, limit, alpha, offset};
  }
  static Activation geglu_tanh() { return moire_activation{MOIRE_GEGLU_TANH, 0, 0, 0}; }
  static Activation reglu() { return moire_activation{MOIRE_REGLU, 0, 0, 0}; }
  static Activation reglu2() { return moire_activation{MOIRE_REGLU2, 0, 0, 0}; }
};

MOIRE_DECLARE_OP(glu, GluArgs)
MOIRE_DECLARE_OP(glu_backward, GluBackwardArgs)
// One layout to another, in one pass.
MOIRE_DECLARE_OP(convert_glu, ConvertGluArgs)
// Halves to blocks along `dim`, and the exact inverse. `source` and `target` have the same shape
// and do not overlap.
MOIRE_API Status interleave_glu(const Context& context, const TensorView& source,
                                const TensorView& target, int64_t block, int dim = 0);
MOIRE_API Status deinterleave_glu(const Context& context, const TensorView& source,
                                  const TensorView& target, int64_t block, int dim = 0);

}  // namespace moire
