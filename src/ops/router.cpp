// Scaffold: validation and dispatch of router, router_backward.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/routing.h>

#include "ops/dispatch.h"

namespace moire {

Status router(const Context& context, const RouterArgs& args) {
  return dispatch(context, "router", args, Workspace{}, [] { return Cost{}; });
}
Status router_backward(const Context& context, const RouterBackwardArgs& args) {
  return dispatch(context, "router_backward", args, Workspace{}, [] { return Cost{}; });
}

}  // namespace moire
