// The ragged grouped GEMM, one entry point per epilogue. Structs, shapes and formulas: moire.h.
#pragma once

#include <moire/context.h>
#include <moire/glu.h>
#include <moire/groups.h>
#include <moire/tensor.h>

namespace moire {

using GroupedGemmArgs = Args<moire_grouped_gemm_args>;
using GroupedGemmGluArgs = Args<moire_grouped_gemm_glu_args>;
using GroupedGemmGluBackwardArgs = Args<moire_grouped_gemm_glu_backward_args>;
using GroupedGemmWgradArgs = Args<moire_grouped_gemm_wgrad_args>;
using BiasBackwardArgs = Args<moire_bias_backward_args>;

// d = a * op(b) (+ bias): forward and dgrad.
MOIRE_API Status grouped_gemm(const Context& context, const GroupedGemmArgs& args);
MOIRE_API Status grouped_gemm_workspace(const Context& context, const GroupedGemmArgs& args,
                                        size_t* bytes);

// FC1 with the activation: z = a * b^T (+ bias), act = glu(z) * probs.
MOIRE_API Status grouped_gemm_glu(const Context& context, const GroupedGemmGluArgs& args);
MOIRE_API Status grouped_gemm_glu_workspace(const Context& context, const GroupedGemmGluArgs& args,
                                            size_t* bytes);

// FC2 dgrad with the activation's backward.
MOIRE_API Status grouped_gemm_glu_backward(const Context& context,
                                           const GroupedGemmGluBackwardArgs& args);
MOIRE_API Status grouped_gemm_glu_backward_workspace(const Context& context,
                                                     const GroupedGemmGluBackwardArgs& args,
                                                     size_t* bytes);

// d_g = beta_g * d_g + a_g^T * b_g: the weight gradient.
MOIRE_API Status grouped_gemm_wgrad(const Context& context, const GroupedGemmWgradArgs& args);
MOIRE_API Status grouped_gemm_wgrad_workspace(const Context& context,
                                              const GroupedGemmWgradArgs& args, size_t* bytes);

// Gradients of a grouped bias and of its per-row scale.
MOIRE_API Status bias_backward(const Context& context, const BiasBackwardArgs& args);
MOIRE_API Status bias_backward_workspace(const Context& context, const BiasBackwardArgs& args,
                                         size_t* bytes);

}  // namespace moire
