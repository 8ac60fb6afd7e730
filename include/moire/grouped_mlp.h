// The grouped linear layer and the grouped MLP, forward and backward. Structs, shapes and formulas:
// moire.h.
#pragma once

#include <moire/context.h>
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/groups.h>
#include <moire/tensor.h>

namespace moire {

MOIRE_DECLARE_OP_WITH_WORKSPACE(grouped_linear, GroupedLinearArgs)
MOIRE_DECLARE_OP_WITH_WORKSPACE(grouped_linear_backward, GroupedLinearBackwardArgs)
MOIRE_DECLARE_OP_WITH_WORKSPACE(grouped_mlp, GroupedMlpArgs)
MOIRE_DECLARE_OP_WITH_WORKSPACE(grouped_mlp_backward, GroupedMlpBackwardArgs)

}  // namespace moire
