// Experts over ranks from the definitions: which tokens go where, and the sum of what comes back.
#pragma once

#include <moire.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "reference/comparison.h"
#include "reference/tensor.h"

namespace moire::reference {

struct DispatchPlanResults {
  std::vector<int64_t> places;  // [T * R], -1 where not sent
  std::vector<int64_t> counts;  // [R]
};
DispatchPlanResults dispatch_plan(const moire_dispatch_plan_args& args);

// y [T, H] of the tokens of `rank`, whose rows at every rank d are among rows[d] [R * C, H].
Matrix combine(const TensorView& places, const std::vector<TensorView>& rows, int64_t rank);
// topk_weights [T, k] of the tokens of `rank`, of each choice that of its one row among rows[d].
Matrix combine_weights(const moire_combine_args& args, const std::vector<TensorView>& rows,
                       int64_t rank);

// ---- calls of all ranks, by their structs, asked before the call: what they return judges after

using Judge = std::function<std::vector<OutputErrors>()>;
Judge expect_plans(const std::vector<moire_dispatch_plan_args>& calls);
// Of whole windows, with what is between their tensors and in rows that nobody sent. Nothing moves
// where it `is_refused`.
Judge expect_dispatch(const std::vector<moire_dispatch_args>& calls,
                      const std::vector<std::span<std::byte>>& windows, bool is_refused);
Judge expect_combines(const std::vector<moire_combine_args>& calls);
// Whether a rank has more tokens for another than that has room for.
bool has_excess(const std::vector<moire_dispatch_plan_args>& plans);

}  // namespace moire::reference
