// Routing: which experts a token goes to, the order by expert, and there and back. Structs and
// formulas: moire.h.
#pragma once

#include <moire/context.h>
#include <moire/groups.h>
#include <moire/tensor.h>

namespace moire {

using RouterArgs = Args<moire_router_args>;
using RouterBackwardArgs = Args<moire_router_backward_args>;
using PermutePlanArgs = Args<moire_permute_plan_args>;
using PermuteArgs = Args<moire_permute_args>;
using UnpermuteArgs = Args<moire_unpermute_args>;
using UnpermuteBackwardArgs = Args<moire_unpermute_backward_args>;

MOIRE_API Status router(const Context& context, const RouterArgs& args);
MOIRE_API Status router_backward(const Context& context, const RouterBackwardArgs& args);

MOIRE_API Status permute_plan(const Context& context, const PermutePlanArgs& args);
MOIRE_API Status permute_plan_workspace(const Context& context, const PermutePlanArgs& args,
                                        size_t* bytes);

MOIRE_API Status permute(const Context& context, const PermuteArgs& args);
MOIRE_API Status unpermute(const Context& context, const UnpermuteArgs& args);
MOIRE_API Status unpermute_backward(const Context& context, const UnpermuteBackwardArgs& args);

}  // namespace moire
