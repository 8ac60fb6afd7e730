// permute: validation and dispatch. Main path: permute.
#include <moire/routing.h>

#include <algorithm>

#include "ops/dispatch.h"
#include "ops/scatter_check.h"

namespace moire {
namespace {

void check_rows(ArgumentCheck& check, const PermuteArgs& args) {
  const TensorView x = args.x, gather_idx = args.gather_idx, rows = args.rows;
  const Groups groups = args.groups;
  if (!check.ranked("x", x, kFloatTypes, 2)) return;
  check.tensor("gather_idx", gather_idx, kIndexTypes, {{"capacity", groups.capacity}});
  check.tensor("rows", rows, kFloatTypes, {{"capacity", groups.capacity}, {"H", x.shape[1]}});
  check.same_dtype("x", x, "rows", rows);
  if (!check.ok() || !check.reads_values()) return;
  check.indices("gather_idx", gather_idx, rows_in_use(groups), 0, x.shape[0]);
}

void check_probs(ArgumentCheck& check, const PermuteArgs& args) {
  const TensorView topk_weights = args.topk_weights, scatter_idx = args.scatter_idx,
                   probs = args.probs;
  if (!check.ranked("topk_weights", topk_weights, kFP32Only, 2)) return;
  const int64_t num_tokens = topk_weights.shape[0];
  check.tensor("scatter_idx", scatter_idx, kIndexTypes,
               {{"T", num_tokens}, {"k", topk_weights.shape[1]}});
  check.tensor("probs", probs, kFP32Only, {{"capacity", args.groups.capacity}});
  const TensorView x = args.x;
  check.require(!x.is_present() || x.shape[0] == num_tokens, "x is ", x, " but topk_weights is ",
                topk_weights, ": both must have the same number of tokens");
  check_scatter(check, scatter_idx, args.groups);
}

Status validate(const Context& context, const PermuteArgs& args) {
  ArgumentCheck check("permute", context, ArgumentCheck::Purpose::kRun);
  const bool moves_rows = args.x.rank != 0 || args.rows.rank != 0;
  const bool moves_probs = args.topk_weights.rank != 0 || args.probs.rank != 0;
  check.require(moves_rows || moves_probs,
                "there is nothing to do: x and rows, or topk_weights, scatter_idx and probs, must "
                "be present");
  check.enumerator("tail", args.tail, 2);
  check.groups(args.groups);
  if (check.ok() && moves_rows) check_rows(check, args);
  if (check.ok() && moves_probs) check_probs(check, args);
  if (moves_rows && moves_probs) {
    check_inverse(check, args.gather_idx, args.scatter_idx, args.groups);
  }
  return check.status();
}

Cost cost_of(const PermuteArgs& args) {
  const TensorView subject = args.rows.rank != 0 ? args.rows : args.probs;
  Cost cost;
  cost.problem =
      concat(args.groups.num_groups, " groups, capacity ", args.groups.capacity, ", ", subject);
  if (args.rows.rank != 0) {
    // A token that several rows copy has to be read once.
    cost.bytes_read += std::min(bytes_of(args.rows), bytes_of(args.x)) + bytes_of(args.gather_idx);
  }
  if (args.probs.rank != 0) {
    cost.bytes_read += bytes_of(args.topk_weights) + bytes_of(args.scatter_idx);
  }
  return cost;
}

}  // namespace

Status permute(const Context& context, const PermuteArgs& args) {
  MOIRE_RETURN_IF_ERROR(validate(context, args));
  return dispatch(context, "permute", args, [&] { return cost_of(args); });
}

}  // namespace moire
