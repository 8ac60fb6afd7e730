// Scaffold: validation and dispatch of grouped_gemm_glu_backward.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/routing.h>

#include "ops/dispatch.h"

namespace moire {

Status grouped_gemm_glu_backward(const Context& context, const GroupedGemmGluBackwardArgs& args) {
  return dispatch(context, "grouped_gemm_glu_backward", args, args.workspace,
                  [] { return Cost{}; });
}
Status grouped_gemm_glu_backward_workspace(const Context& context,
                                           const GroupedGemmGluBackwardArgs& args, size_t* bytes) {
  return size_workspace(context, "grouped_gemm_glu_backward", args, bytes);
}

}  // namespace moire
