// Scaffold: validation and dispatch of permute_plan.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/routing.h>

#include "ops/dispatch.h"

namespace moire {

Status permute_plan(const Context& context, const PermutePlanArgs& args) {
  return dispatch(context, "permute_plan", args, args.workspace, [] { return Cost{}; });
}
Status permute_plan_workspace(const Context& context, const PermutePlanArgs& args, size_t* bytes) {
  return size_workspace(context, "permute_plan", args, bytes);
}

}  // namespace moire
