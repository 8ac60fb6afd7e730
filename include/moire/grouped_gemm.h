// The ragged grouped GEMM, one entry point per epilogue. Structs, shapes and formulas: moire.h.
#pragma once

#include <moire/context.h>
#include <moire/glu.h>
#include <moire/groups.h>
#include <moire/tensor.h>

namespace moire {

// d = a * op(b) (+ bias): forward and dgrad.
MOIRE_DECLARE_OP_WITH_WORKSPACE(grouped_gemm, GroupedGemmArgs)
// FC1 with the activation: z = a * b^T (+ bias), act = glu(z) * probs.
MOIRE_DECLARE_OP_WITH_WORKSPACE(grouped_gemm_glu, GroupedGemmGluArgs)
// FC2 dgrad with the activation's backward.
MOIRE_DECLARE_OP_WITH_WORKSPACE(grouped_gemm_glu_backward, GroupedGemmGluBackwardArgs)
// d_g = beta_g * d_g + a_g^T * b_g: the weight gradient.
MOIRE_DECLARE_OP_WITH_WORKSPACE(grouped_gemm_wgrad, GroupedGemmWgradArgs)
// Gradients of a grouped bias and of its per-row scale.
MOIRE_DECLARE_OP_WITH_WORKSPACE(bias_backward, BiasBackwardArgs)

}  // namespace moire
