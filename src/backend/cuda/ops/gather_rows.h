// Rows brought into expert order, for permute and for kernels that load neighbouring rows.
#pragma once

#include <moire/tensor.h>

#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {

// rows_i = x[index_i] for each row in use, of one dtype; the tail gets zeros or stays. An index
// outside x is reported under the launcher's op and `index_name`, a literal.
void gather_rows(Launcher& launcher, const TensorView& x, const TensorView& index,
                 const char* index_name, const TensorView& rows, const moire_groups& groups,
                 int32_t tail);

}  // namespace moire::cuda::ops
