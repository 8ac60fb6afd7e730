// What a call of grouped_mlp_backward asks for, and whether it may.
#pragma once

#include <moire/grouped_mlp.h>

#include "core/argument_check.h"
#include "mlp/recipe.h"

namespace moire {

// What a call asks for.
struct MlpBackwardNeeds {
  explicit MlpBackwardNeeds(const GroupedMlpBackwardArgs& args)
      : grad_z(fields::needs_grad_z(args)),
        makes_act(args.act_is_saved == 0 && (is_present(args.grad_w2) || is_present(args.act) ||
                                             is_present(args.act_columnwise))),
        scale_from_b2(is_present(args.grad_probs) && is_present(args.b2)),
        b2(scale_from_b2 || is_present(args.grad_b2)) {}
  bool grad_z;         // the FC2 dgrad runs
  bool makes_act;      // FC2's input again, for its weight gradient or for the caller
  bool scale_from_b2;  // probs scales b2 as well
  bool b2;             // sums of grad_y itself
};

void validate(ArgumentCheck& check, const GroupedMlpBackwardArgs& args);

}  // namespace moire
