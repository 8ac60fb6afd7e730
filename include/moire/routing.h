// Routing: which experts a token goes to, the order by expert, and there and back. Structs and
// formulas: moire.h.
#pragma once

#include <moire/context.h>
#include <moire/groups.h>
#include <moire/tensor.h>

namespace moire {

MOIRE_DECLARE_OP(router, RouterArgs)
MOIRE_DECLARE_OP(router_backward, RouterBackwardArgs)
MOIRE_DECLARE_OP_WITH_WORKSPACE(permute_plan, PermutePlanArgs)
MOIRE_DECLARE_OP(permute, PermuteArgs)
MOIRE_DECLARE_OP(unpermute, UnpermuteArgs)
MOIRE_DECLARE_OP(unpermute_backward, UnpermuteBackwardArgs)

}  // namespace moire
