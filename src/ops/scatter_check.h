// What the ops that scatter by scatter_idx ask of it.
#pragma once

#include <moire/groups.h>
#include <moire/tensor.h>

#include "core/argument_check.h"
#include "core/rows_in_use.h"

namespace moire {

// Every index is -1 or a row in use, and there are as many as rows in use: an output scattered by
// them is written whole. That no row is named twice is the plan's promise and is not looked for.
bool check_scatter(ArgumentCheck& check, const TensorView& scatter_idx, const Groups& groups);

// Of indices that have passed check_scatter, and gather_idx its own check: each row in use is named
// by the token that it is gathered from, so that scatter_idx is the inverse of gather_idx.
bool check_inverse(ArgumentCheck& check, const TensorView& gather_idx,
                   const TensorView& scatter_idx, const Groups& groups);

}  // namespace moire
