// Scaffold: validation and dispatch of splits_to_offsets.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/routing.h>

#include "ops/dispatch.h"

namespace moire {

Status splits_to_offsets(const Context& context, const SplitsToOffsetsArgs& args) {
  return dispatch(context, "splits_to_offsets", args, args.workspace, [] { return Cost{}; });
}
Status splits_to_offsets_workspace(const Context& context, const SplitsToOffsetsArgs& args,
                                   size_t* bytes) {
  return size_workspace(context, "splits_to_offsets", args, bytes);
}

}  // namespace moire
