// Scaffold: validation and dispatch of grouped_gemm_glu.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/routing.h>

#include "ops/dispatch.h"

namespace moire {

Status grouped_gemm_glu(const Context& context, const GroupedGemmGluArgs& args) {
  return dispatch(context, "grouped_gemm_glu", args, args.workspace, [] { return Cost{}; });
}
Status grouped_gemm_glu_workspace(const Context& context, const GroupedGemmGluArgs& args,
                                  size_t* bytes) {
  return size_workspace(context, "grouped_gemm_glu", args, bytes);
}

}  // namespace moire
