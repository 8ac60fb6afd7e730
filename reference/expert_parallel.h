// Experts over ranks from the definitions: which tokens go where, and the sum of what comes back.
#pragma once

#include <moire.h>

#include <cstdint>
#include <vector>

#include "reference/tensor.h"

namespace moire::reference {

struct DispatchPlanResults {
  std::vector<int64_t> places;  // [T * R], -1 where not sent
  std::vector<int64_t> counts;  // [R]
};
DispatchPlanResults dispatch_plan(const moire_dispatch_plan_args& args);

// y [T, H] of the tokens of `rank`, whose rows at every rank d are among rows[d] [R * C, H].
Matrix combine(const TensorView& places, const std::vector<TensorView>& rows, int64_t rank);

}  // namespace moire::reference
