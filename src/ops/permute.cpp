// Scaffold: validation and dispatch of permute.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/routing.h>

#include "ops/dispatch.h"

namespace moire {

Status permute(const Context& context, const PermuteArgs& args) {
  return dispatch(context, "permute", args, Workspace{}, [] { return Cost{}; });
}

}  // namespace moire
