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

void validate(ArgumentCheck& check, const PermuteArgs& args) {
  const bool moves_rows = is_present(args.x) || is_present(args.rows);
  const bool moves_probs = is_present(args.topk_weights) || is_present(args.probs);
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
}

std::string problem_of(const PermuteArgs& args) {
  return concat(args.groups.num_groups, " groups, capacity ", args.groups.capacity, ", ",
                TensorView(is_present(args.rows) ? args.rows : args.probs));
}

// A token that several rows copy has to be read once.
int64_t bytes_read_of(const PermuteArgs& args) {
  const int64_t tokens = TensorView(args.x).num_bytes();
  return bytes_read(args) - tokens + std::min(tokens, TensorView(args.rows).num_bytes());
}

}  // namespace

MOIRE_DEFINE_OP(permute, bytes_read_of)

}  // namespace moire
