// Weights from floats to what Hopper's FP8 tensor cores read of them (core/prepared_weight.h), in
// one read: tiles of 128 x 128, rows as they lie and turned over. MXFP8 is folded
// (docs/numerics.md).
#pragma once

#include "backend/cuda/runtime/launch.h"
#include "core/prepared_weight.h"

namespace moire::cuda::ops {

// `made` has the copies that are wanted, of take_core_weight(). The recipe is FP8_BLOCK or
// MXFP8_FAST.
Status make_core_weights(const Context& context, const Weight& weight, int32_t recipe,
                         int32_t fractional_scales, const WeightCopies& made);
int64_t launches_of_core_weights(const Weight& weight);

}  // namespace moire::cuda::ops
