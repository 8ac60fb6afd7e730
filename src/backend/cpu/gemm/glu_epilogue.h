// What the GEMMs with a gated activation do with finished sums. The arithmetic on a row is that of
// glu_rows-inl.h, which the standalone ops use as well: fused and unfused results have equal bits.
#pragma once

#include <moire/glu.h>

#include "backend/cpu/gemm/engine.h"
#include "backend/cpu/gemm/quantized_output.h"
#include "core/glu_layout.h"

namespace moire::cpu::gemm {

// z = round(sum + bias), kept or not; act = round(glu(z) * prob), stored, quantised or both. Sums
// of a paired product; whole blocks of kQuantizedRows where act is quantised.
struct GluEpilogue {
  moire_activation activation;
  ResolvedGluLayout layout;
  moire_groups groups;
  DType storage;  // of z and act
  TensorView bias, probs, z, act;
  QuantizedOutput quantized_act;

  void apply(const Sums& sums) const;
};

// grad_act = round(sum); then grad_z and act, stored, quantised or both, and partial sums of
// grad_probs and grad_bias.
struct GluBackwardEpilogue {
  moire_activation activation;
  ResolvedGluLayout layout;
  moire_groups groups;
  TensorView z, probs, grad_z, act;
  float* prob_partials;  // [capacity][ceil(F / 64)], or null
  float* bias_partials;  // [RowBlocks::bound][2F], each row as grad_z lies, or null
  QuantizedOutput quantized_grad_z, quantized_act;

  void apply(const Sums& sums) const;
};

}  // namespace moire::cpu::gemm
