// What the ops that scatter by scatter_idx ask of it.
#pragma once

#include <moire/groups.h>
#include <moire/tensor.h>

#include "core/argument_check.h"

namespace moire {

// Rows in use. 0 where there are no groups; read only where values may be read.
inline int64_t rows_in_use(const Groups& groups) {
  return groups.num_groups == 0 ? 0 : groups.offsets[groups.num_groups];
}

// Every index is -1 or a row in use, and there are as many as rows in use: an output scattered by
// them is written whole. That no row is named twice is the plan's promise and is not looked for.
bool check_scatter(ArgumentCheck& check, const TensorView& scatter_idx, const Groups& groups);

// Of indices that have passed check_scatter, and gather_idx its own check: each row in use is named
// by the token that it is gathered from, so that scatter_idx is the inverse of gather_idx.
bool check_inverse(ArgumentCheck& check, const TensorView& gather_idx,
                   const TensorView& scatter_idx, const Groups& groups);

}  // namespace moire
