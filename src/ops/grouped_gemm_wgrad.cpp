// Scaffold: validation and dispatch of grouped_gemm_wgrad.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/routing.h>

#include "ops/dispatch.h"

namespace moire {

Status grouped_gemm_wgrad(const Context& context, const GroupedGemmWgradArgs& args) {
  return dispatch(context, "grouped_gemm_wgrad", args, args.workspace, [] { return Cost{}; });
}
Status grouped_gemm_wgrad_workspace(const Context& context, const GroupedGemmWgradArgs& args,
                                    size_t* bytes) {
  return size_workspace(context, "grouped_gemm_wgrad", args, bytes);
}

}  // namespace moire
