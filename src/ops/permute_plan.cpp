// permute_plan: validation and dispatch. Main path: permute_plan.
#include <moire/routing.h>

#include <limits>

#include "ops/dispatch.h"

namespace moire {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

void validate(ArgumentCheck& check, const PermutePlanArgs& args) {
  const TensorView topk_idx = args.topk_idx, offsets = args.offsets, gather_idx = args.gather_idx,
                   scatter_idx = args.scatter_idx;
  const int64_t num_groups = args.num_groups, num_tokens = topk_idx.shape[0];
  check.ranked("topk_idx", topk_idx, kIndexTypes, 2);
  if (!check.require(num_groups >= 0 && num_groups < kMaxInt32, "num_groups is ", num_groups,
                     ", must be 0 to ", kMaxInt32 - 1)) {
    return;
  }
  check.tensor("offsets", offsets, kInt64Only, {{"num_groups + 1", num_groups + 1}});
  check.ranked("gather_idx", gather_idx, kIndexTypes, 1);
  check.tensor("scatter_idx", scatter_idx, kIndexTypes,
               {{"T", num_tokens}, {"k", topk_idx.dim(1)}});
  check.same_dtype("gather_idx", gather_idx, "scatter_idx", scatter_idx);
  check.require(gather_idx.type() == DType::kInt64 ||
                    (num_tokens <= kMaxInt32 && gather_idx.columns() <= kMaxInt32),
                "gather_idx is ", gather_idx, " for ", num_tokens, " tokens, needs int64 past ",
                kMaxInt32);
  check.indices("topk_idx", topk_idx, topk_idx.num_elements(), -1, num_groups + 1);
}

std::string problem_of(const PermutePlanArgs& args) {
  return concat(args.topk_idx.shape[0], " tokens x ", args.topk_idx.shape[1], " choices, ",
                args.num_groups, " groups, capacity ", args.gather_idx.shape[0]);
}

}  // namespace

MOIRE_DEFINE_OP_WITH_WORKSPACE(permute_plan)

}  // namespace moire
