// The grouped linear layer and the grouped MLP, forward and backward. Structs, shapes and formulas:
// moire.h.
#pragma once

#include <moire/context.h>
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/groups.h>
#include <moire/tensor.h>

namespace moire {

using GroupedLinearArgs = Args<moire_grouped_linear_args>;
using GroupedLinearBackwardArgs = Args<moire_grouped_linear_backward_args>;
using GroupedMlpArgs = Args<moire_grouped_mlp_args>;
using GroupedMlpBackwardArgs = Args<moire_grouped_mlp_backward_args>;

MOIRE_API Status grouped_linear(const Context& context, const GroupedLinearArgs& args);
MOIRE_API Status grouped_linear_workspace(const Context& context, const GroupedLinearArgs& args,
                                          size_t* bytes);
MOIRE_API Status grouped_linear_backward(const Context& context,
                                         const GroupedLinearBackwardArgs& args);
MOIRE_API Status grouped_linear_backward_workspace(const Context& context,
                                                   const GroupedLinearBackwardArgs& args,
                                                   size_t* bytes);

MOIRE_API Status grouped_mlp(const Context& context, const GroupedMlpArgs& args);
MOIRE_API Status grouped_mlp_workspace(const Context& context, const GroupedMlpArgs& args,
                                       size_t* bytes);
MOIRE_API Status grouped_mlp_backward(const Context& context, const GroupedMlpBackwardArgs& args);
MOIRE_API Status grouped_mlp_backward_workspace(const Context& context,
                                                const GroupedMlpBackwardArgs& args, size_t* bytes);

}  // namespace moire
