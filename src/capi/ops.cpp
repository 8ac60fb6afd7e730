// C entries of the ops: each is the C++ function behind the boundary.
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/grouped_mlp.h>
#include <moire/groups.h>
#include <moire/quantize.h>
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
MOIRE_ENTRY(quantize)
MOIRE_ENTRY(quantize_weight)
MOIRE_ENTRY(dequantize)
MOIRE_ENTRY(requantize)
MOIRE_ENTRY(convert_scales)
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

int32_t moire_scales_shape(int32_t scaling, int32_t direction, int32_t layout, int64_t rows,
                           int64_t k, int64_t num_groups, int64_t* shape) {
  return moire::capi::guarded(
      [&] { return moire::scales_shape(scaling, direction, layout, rows, k, num_groups, shape); });
}

}  // extern "C"
