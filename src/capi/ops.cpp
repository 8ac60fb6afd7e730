// C entries of the ops: each is the C++ function behind the boundary.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/grouped_mlp.h>
#include <moire/groups.h>
#include <moire/routing.h>

#include "capi/boundary.h"

// One C entry, and one with its workspace twin.
#define MOIRE_ENTRY(name)                                                               \
  int32_t moire_##name(const moire_context* context, const moire_##name##_args* args) { \
    return moire::capi::call("moire_" #name, context, args, moire::name);               \
  }
#define MOIRE_ENTRY_WITH_WORKSPACE(name)                                                          \
  MOIRE_ENTRY(name)                                                                               \
  int32_t moire_##name##_workspace(const moire_context* context, const moire_##name##_args* args, \
                                   size_t* bytes) {                                               \
    return moire::capi::call_workspace("moire_" #name "_workspace", context, args, bytes,         \
                                       moire::name##_workspace);                                  \
  }

extern "C" {

MOIRE_ENTRY_WITH_WORKSPACE(splits_to_offsets)
MOIRE_ENTRY(glu)
MOIRE_ENTRY(glu_backward)
MOIRE_ENTRY(convert_glu)
MOIRE_ENTRY_WITH_WORKSPACE(grouped_gemm)
MOIRE_ENTRY_WITH_WORKSPACE(grouped_gemm_glu)
MOIRE_ENTRY_WITH_WORKSPACE(grouped_gemm_glu_backward)
MOIRE_ENTRY_WITH_WORKSPACE(grouped_gemm_wgrad)
MOIRE_ENTRY_WITH_WORKSPACE(bias_backward)
MOIRE_ENTRY(router)
MOIRE_ENTRY(router_backward)
MOIRE_ENTRY_WITH_WORKSPACE(permute_plan)
MOIRE_ENTRY(permute)
MOIRE_ENTRY(unpermute)
MOIRE_ENTRY(unpermute_backward)
MOIRE_ENTRY_WITH_WORKSPACE(grouped_linear)
MOIRE_ENTRY_WITH_WORKSPACE(grouped_linear_backward)
MOIRE_ENTRY_WITH_WORKSPACE(grouped_mlp)
MOIRE_ENTRY_WITH_WORKSPACE(grouped_mlp_backward)

}  // extern "C"
