// Products on Hopper's FP8 tensor cores, for the files that put steps around them.
#pragma once

#include "backend/implementation.h"

namespace moire::cuda::sm90::scaled {

// The op of kGroupedGemm, as a step of the op that `op`, a literal, names.
Status multiply(const Context& context, const char* op, const GroupedGemmArgs& args);

}  // namespace moire::cuda::sm90::scaled
