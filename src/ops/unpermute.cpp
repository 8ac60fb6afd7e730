// unpermute and its gradient: validation and dispatch. Main paths: unpermute, unpermute_backward.
#include <moire/routing.h>

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

void validate(ArgumentCheck& check, const UnpermuteArgs& args) {
  const bool sums = is_present(args.rows) || is_present(args.y) || is_present(args.weights);
  const bool moves_weights = is_present(args.probs) || is_present(args.topk_weights);
  check.require(sums || moves_weights,
                "there is nothing to do: rows and y, or probs and topk_weights, must be present");
  check.ranked("scatter_idx", args.scatter_idx, kIndexTypes, 2);
  if (check.ok() && sums) check_sum(check, args);
  if (check.ok() && moves_weights) check_weights(check, args);
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

void validate(ArgumentCheck& check, const UnpermuteBackwardArgs& args) {
  const TensorView grad_y = args.grad_y, scatter_idx = args.scatter_idx;
  check.enumerator("tail", args.tail, 2);
  check.groups(args.groups);
  check.ranked("grad_y", grad_y, kFloatTypes, 2);
  if (!check.ranked("scatter_idx", scatter_idx, kIndexTypes, 2)) return;
  check.require(scatter_idx.shape[0] == grad_y.shape[0], "scatter_idx is ", scatter_idx,
                " but grad_y is ", grad_y, ": both must have the same number of tokens");
  check.optional_tensor("weights", args.weights, kFP32Only,
                        {{"T", scatter_idx.shape[0]}, {"k", scatter_idx.shape[1]}});
  if (check.ok() && is_present(args.grad_rows)) check_grad_rows(check, args);
  if (check.ok() && is_present(args.grad_weights)) check_grad_weights(check, args);
  check_scatter(check, scatter_idx, args.groups);
}

std::string problem_of(const TensorView& scatter_idx, const TensorView& subject) {
  return concat(scatter_idx.shape[0], " tokens x ", scatter_idx.shape[1], " choices, ", subject);
}

std::string problem_of(const UnpermuteArgs& args) {
  return problem_of(args.scatter_idx, is_present(args.rows) ? args.rows : args.probs);
}

std::string problem_of(const UnpermuteBackwardArgs& args) {
  return problem_of(args.scatter_idx, args.grad_y);
}

// Of the capacity's rows and probs, one for each choice.
int64_t bytes_read_of(const UnpermuteArgs& args) {
  const TensorView scatter_idx(args.scatter_idx), weights(args.weights), rows(args.rows);
  const int64_t row_bytes = rows.columns() * dtype_size(rows.type());
  const int64_t prob_bytes = is_present(args.probs) ? dtype_size(DType::kFP32) : 0;
  return scatter_idx.num_bytes() + weights.num_bytes() +
         scatter_idx.num_elements() * (row_bytes + prob_bytes);
}

}  // namespace

MOIRE_DEFINE_OP(unpermute, bytes_read_of)
MOIRE_DEFINE_OP(unpermute_backward)

}  // namespace moire
