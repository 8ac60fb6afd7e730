// Scaffold: validation and dispatch of bias_backward.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/routing.h>

#include "ops/dispatch.h"

namespace moire {

Status bias_backward(const Context& context, const BiasBackwardArgs& args) {
  return dispatch(context, "bias_backward", args, args.workspace, [] { return Cost{}; });
}
Status bias_backward_workspace(const Context& context, const BiasBackwardArgs& args,
                               size_t* bytes) {
  return size_workspace(context, "bias_backward", args, bytes);
}

}  // namespace moire
