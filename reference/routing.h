// Routing from the definitions: router, permute plan, permute and unpermute with their gradients,
// and the arrays derived from splits.
#pragma once

#include <moire.h>

#include <cstdint>
#include <vector>

#include "reference/tensor.h"

namespace moire::reference {

// One array per output of args; splits must be valid.
std::vector<std::vector<int64_t>> splits_to_offsets(const moire_splits_to_offsets_args& args);

struct RouterResults {
  Matrix choice_scores;           // [T, E]: what the choice is made by, scores + expert_bias
  std::vector<int64_t> topk_idx;  // [T * k]
  Matrix topk_weights;            // [T, k], of topk_idx
};
// Scores closer than their bounds may be chosen in either order; see router_weights.
RouterResults router(const moire_router_args& args);
// The weights of a given choice [T, k].
Matrix router_weights(const moire_router_args& args, const std::vector<int64_t>& topk_idx);
// grad_logits [T, E].
Matrix router_backward(const moire_router_backward_args& args);

struct PlanResults {
  std::vector<int64_t> offsets;      // [G + 1]
  std::vector<int64_t> gather_idx;   // [capacity], -1 where unused
  std::vector<int64_t> scatter_idx;  // [T * k], -1 where dropped
};
PlanResults permute_plan(const moire_permute_plan_args& args);

// Rows in use only; results that args do not ask for are empty.
struct PermuteResults {
  Matrix rows;
  Matrix probs;  // [rows, 1]
};
PermuteResults permute(const moire_permute_args& args);

struct UnpermuteResults {
  Matrix y;
  Matrix topk_weights;  // [T, k]
};
UnpermuteResults unpermute(const moire_unpermute_args& args);

struct UnpermuteBackwardResults {
  Matrix grad_rows;
  Matrix grad_weights;  // [T, k]
};
UnpermuteBackwardResults unpermute_backward(const moire_unpermute_backward_args& args);

}  // namespace moire::reference
