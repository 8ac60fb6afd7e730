// The CPU's implementation of every op; one file each.
#pragma once

#include "backend/implementation.h"

namespace moire::cpu {

MOIRE_FOR_EACH_GEMM(MOIRE_DECLARE_IMPLEMENTATION)
MOIRE_FOR_EACH_OTHER_OP(MOIRE_DECLARE_IMPLEMENTATION)
WeightForm prepared_form(const DeviceState& state, const PrepareWeightArgs& args);

}  // namespace moire::cpu
