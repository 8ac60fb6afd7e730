// The operands of one row of glu and of glu_backward, the same type for every SIMD target.
#pragma once

namespace moire::cpu {

// Null pointers stand for absent operands.
struct GluRow {
  const void* z;
  float prob;
  void* act;
};

struct GluBackwardRow {
  const void* z;
  float prob;
  const void* grad_act;
  void* grad_z;
  void* act;
  float* grad_prob;
};

}  // namespace moire::cpu
