// Scaffold: validation and dispatch of grouped_gemm.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/routing.h>

#include "ops/dispatch.h"

namespace moire {

Status grouped_gemm(const Context& context, const GroupedGemmArgs& args) {
  return dispatch(context, "grouped_gemm", args, args.workspace, [] { return Cost{}; });
}
Status grouped_gemm_workspace(const Context& context, const GroupedGemmArgs& args, size_t* bytes) {
  return size_workspace(context, "grouped_gemm", args, bytes);
}

}  // namespace moire
