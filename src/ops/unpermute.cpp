// Scaffold: validation and dispatch of unpermute, unpermute_backward.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/routing.h>

#include "ops/dispatch.h"

namespace moire {

Status unpermute(const Context& context, const UnpermuteArgs& args) {
  return dispatch(context, "unpermute", args, Workspace{}, [] { return Cost{}; });
}
Status unpermute_backward(const Context& context, const UnpermuteBackwardArgs& args) {
  return dispatch(context, "unpermute_backward", args, Workspace{}, [] { return Cost{}; });
}

}  // namespace moire
