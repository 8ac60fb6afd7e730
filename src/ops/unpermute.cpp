// unpermute and its gradient: validation and dispatch. Main paths: unpermute, unpermute_backward.
#include <moire/routing.h>

#include "core/sizes.h"
#include "ops/dispatch.h"
#include "ops/scatter_check.h"

namespace moire {
namespace {

void check_sum(ArgumentCheck& check, const UnpermuteArgs& args) {
  const TensorView rows = args.rows, scatter_idx = args.scatter_idx, weights = args.weights,
                   y = args.y;
  if (!check.ranked("rows", rows, kFloatTypes, 2)) return;
  check.optional_tensor("weights", weights, kFP32Only,
                        {{"T", scatter_idx.shape[0]}, {"k", scatter_idx.shape[1]}});
  check.tensor("y", y, kFloatTypes, {{"T", scatter_idx.shape[0]}, {"H", rows.shape[1]}});
  check.require(y.type() == rows.type() || y.type() == DType::kFP32, "y is ", y, " but rows is ",
                rows, ": y must have the dtype of rows, or fp32");
  check.indices("scatter_idx", scatter_idx, scatter_idx.num_elements(), -1, rows.shape[0]);
}

void check_weights(ArgumentCheck& check, const UnpermuteArgs& args) {
  const TensorView probs = args.probs, scatter_idx = args.scatter_idx,
                   topk_weights = args.topk_weights, rows = args.rows;
  if (!check.ranked("probs", probs, kFP32Only, 1)) return;
  check.tensor("topk_weights", topk_weights, kFP32Only,
               {{"T", scatter_idx.shape[0]}, {"k", scatter_idx.shape[1]}});
  check.require(!rows.is_present() || rows.shape[0] == probs.shape[0], "rows is ", rows,
                " but probs is ", probs, ": both must have the same capacity");
  check.indices("scatter_idx", scatter_idx, scatter_idx.num_elements(), -1, probs.shape[0]);
}

Status validate(const Context& context, const UnpermuteArgs& args) {
  ArgumentCheck check("unpermute", context, ArgumentCheck::Purpose::kRun);
  const bool sums = args.rows.rank != 0 || args.y.rank != 0 || args.weights.rank != 0;
  const bool moves_weights = args.probs.rank != 0 || args.topk_weights.rank != 0;
  check.require(sums || moves_weights,
                "there is nothing to do: rows and y, or probs and topk_weights, must be present");
  check.ranked("scatter_idx", args.scatter_idx, kIndexTypes, 2);
  if (check.ok() && sums) check_sum(check, args);
  if (check.ok() && moves_weights) check_weights(check, args);
  return check.status();
}

void check_grad_rows(ArgumentCheck& check, const UnpermuteBackwardArgs& args) {
  const TensorView grad_y = args.grad_y, grad_rows = args.grad_rows;
  check.tensor("grad_rows", grad_rows, kFloatTypes,
               {{"capacity", args.groups.capacity}, {"H", grad_y.shape[1]}});
  check.same_dtype("grad_y", grad_y, "grad_rows", grad_rows);
}

void check_grad_weights(ArgumentCheck& check, const UnpermuteBackwardArgs& args) {
  const TensorView grad_y = args.grad_y, rows = args.rows, grad_weights = args.grad_weights;
  check.tensor("rows", rows, kFloatTypes,
               {{"capacity", args.groups.capacity}, {"H", grad_y.shape[1]}});
  check.tensor("grad_weights", grad_weights, kFP32Only,
               {{"T", grad_y.shape[0]}, {"k", args.scatter_idx.shape[1]}});
}

Status validate(const Context& context, const UnpermuteBackwardArgs& args) {
  ArgumentCheck check("unpermute_backward", context, ArgumentCheck::Purpose::kRun);
  const TensorView grad_y = args.grad_y, scatter_idx = args.scatter_idx;
  check.require(args.grad_rows.rank != 0 || args.grad_weights.rank != 0,
                "there is nothing to do: grad_rows or grad_weights must be present");
  check.enumerator("tail", args.tail, 2);
  check.groups(args.groups);
  check.ranked("grad_y", grad_y, kFloatTypes, 2);
  if (!check.ranked("scatter_idx", scatter_idx, kIndexTypes, 2)) return check.status();
  check.require(scatter_idx.shape[0] == grad_y.shape[0], "scatter_idx is ", scatter_idx,
                " but grad_y is ", grad_y, ": both must have the same number of tokens");
  check.optional_tensor("weights", args.weights, kFP32Only,
                        {{"T", scatter_idx.shape[0]}, {"k", scatter_idx.shape[1]}});
  if (check.ok() && args.grad_rows.rank != 0) check_grad_rows(check, args);
  if (check.ok() && args.grad_weights.rank != 0) check_grad_weights(check, args);
  check_scatter(check, scatter_idx, args.groups);
  return check.status();
}

std::string problem_of(const TensorView& scatter_idx, const TensorView& subject) {
  return concat(scatter_idx.shape[0], " tokens x ", scatter_idx.shape[1], " choices, ", subject);
}

Cost cost_of(const UnpermuteArgs& args) {
  const int64_t choices = TensorView(args.scatter_idx).num_elements();
  Cost cost;
  cost.problem = problem_of(args.scatter_idx, args.rows.rank != 0 ? args.rows : args.probs);
  cost.bytes_read = bytes_of(args.scatter_idx) + bytes_of(args.weights);
  if (args.rows.rank != 0) {
    const TensorView rows(args.rows);
    cost.bytes_read += product(choices, rows.shape[1], dtype_size(rows.type()));
  }
  if (args.probs.rank != 0) cost.bytes_read += choices * dtype_size(DType::kFP32);
  return cost;
}

Cost cost_of(const UnpermuteBackwardArgs& args) {
  Cost cost;
  cost.problem = problem_of(args.scatter_idx, args.grad_y);
  cost.bytes_read = bytes_of(args.grad_y) + bytes_of(args.scatter_idx) + bytes_of(args.weights);
  if (args.grad_weights.rank != 0) cost.bytes_read += bytes_of(args.rows);
  return cost;
}

}  // namespace

Status unpermute(const Context& context, const UnpermuteArgs& args) {
  MOIRE_RETURN_IF_ERROR(validate(context, args));
  return dispatch(context, "unpermute", args, [&] { return cost_of(args); });
}

Status unpermute_backward(const Context& context, const UnpermuteBackwardArgs& args) {
  MOIRE_RETURN_IF_ERROR(validate(context, args));
  return dispatch(context, "unpermute_backward", args, [&] { return cost_of(args); });
}

}  // namespace moire
