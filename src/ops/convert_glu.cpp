// Scaffold: validation and dispatch of convert_glu.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/routing.h>

#include "ops/dispatch.h"

namespace moire {

Status convert_glu(const Context& context, const ConvertGluArgs& args) {
  return dispatch(context, "convert_glu", args, Workspace{}, [] { return Cost{}; });
}
Status interleave_glu(const Context&, const TensorView&, const TensorView&, int64_t, int) {
  return {Code::kInternal, "scaffold"};
}
Status deinterleave_glu(const Context&, const TensorView&, const TensorView&, int64_t, int) {
  return {Code::kInternal, "scaffold"};
}

}  // namespace moire
