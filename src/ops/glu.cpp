// Scaffold: validation and dispatch of glu, glu_backward.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/routing.h>

#include "ops/dispatch.h"

namespace moire {

Status glu(const Context& context, const GluArgs& args) {
  return dispatch(context, "glu", args, Workspace{}, [] { return Cost{}; });
}
Status glu_backward(const Context& context, const GluBackwardArgs& args) {
  return dispatch(context, "glu_backward", args, Workspace{}, [] { return Cost{}; });
}

}  // namespace moire
