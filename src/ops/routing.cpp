// The router, and permute and unpermute by its plan, there and back: validation and dispatch.
#include <moire/routing.h>

#include <algorithm>
#include <cmath>

#include "core/resolved_groups.h"
#include "core/sizes.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

// What both passes share: logits [T, E], k of them chosen, their `weights` or the gradients of
// those, and the scale.
bool check_selection(ArgumentCheck& check, const auto& args, const NamedTensor& weights) {
  const TensorView logits = args.logits, topk_idx = args.topk_idx;
  if (!check.ranked("logits", logits, kFloatTypes, 2)) return false;
  if (!check.ranked("topk_idx", topk_idx, kIndexTypes, 2)) return false;
  const int64_t num_tokens = logits.shape[0], num_experts = logits.shape[1];
  check.require(topk_idx.shape[0] == num_tokens, "topk_idx is ", topk_idx, " but logits is ",
                logits, ": both must have the same number of tokens");
  check.require(topk_idx.shape[1] >= 1 && topk_idx.shape[1] <= num_experts, "topk_idx is ",
                topk_idx, ", its k must be 1 to the ", num_experts, " experts of logits");
  check.require(topk_idx.type() == DType::kInt64 || num_experts <= kMaxInt32, "topk_idx is ",
                topk_idx, ", needs int64 for ", num_experts, " experts");
  check.require(std::isfinite(args.scale), "scale is ", args.scale, ", must be finite");
  return check.tensor(weights.name, weights.tensor, kFP32Only,
                      {{"T", num_tokens}, {"k", topk_idx.shape[1]}});
}

void validate(ArgumentCheck& check, const RouterArgs& args) {
  if (!check_selection(check, args, {"topk_weights", args.topk_weights})) return;
  check.optional_tensor("expert_bias", args.expert_bias, kFP32Only, {{"E", args.logits.shape[1]}});
}

void validate(ArgumentCheck& check, const RouterBackwardArgs& args) {
  if (!check_selection(check, args, {"grad_topk_weights", args.grad_topk_weights})) return;
  const TensorView logits = args.logits, topk_idx = args.topk_idx;
  check.tensor("grad_logits", args.grad_logits, kFloatTypes,
               {{"T", logits.shape[0]}, {"E", logits.shape[1]}});
  check.indices("topk_idx", topk_idx, topk_idx.num_elements(), 0, logits.shape[1]);
}

std::string problem_of(const auto& args) {
  return concat(args.topk_idx.shape[1], " of ", args.logits.shape[1], " experts, ", args.logits);
}

void validate(ArgumentCheck& check, const PermutePlanArgs& args) {
  const TensorView topk_idx = args.topk_idx, gather_idx = args.gather_idx;
  const int64_t num_groups = args.num_groups, num_tokens = topk_idx.shape[0];
  check.ranked("topk_idx", topk_idx, kIndexTypes, 2);
  if (!check.require(num_groups >= 0 && num_groups <= kMostGroups, "num_groups is ", num_groups,
                     ", must be 0 to 2^30")) {
    return;
  }
  check.tensor("offsets", args.offsets, kInt64Only, {{"num_groups + 1", num_groups + 1}});
  check.ranked("gather_idx", gather_idx, kIndexTypes, 1);
  check.tensor("scatter_idx", args.scatter_idx, kIndexTypes,
               {{"T", num_tokens}, {"k", topk_idx.dim(1)}});
  check.same_dtype("gather_idx", gather_idx, "scatter_idx", args.scatter_idx);
  check.require(gather_idx.type() == DType::kInt64 ||
                    (num_tokens <= kMaxInt32 && gather_idx.columns() <= kMaxInt32),
                "gather_idx is ", gather_idx, " for ", num_tokens, " tokens, needs int64 past ",
                kMaxInt32);
  check.indices("topk_idx", topk_idx, topk_idx.num_elements(), -1, num_groups + 1);
}

std::string problem_of(const PermutePlanArgs& args) {
  return concat(args.topk_idx.shape[0], " tokens, top ", args.topk_idx.shape[1], ", ",
                args.num_groups, " groups, capacity ", args.gather_idx.shape[0]);
}

// f(index(row, column)) of a tensor of indices, by the type that it has.
decltype(auto) with_indices(const TensorView& t, auto&& f) {
  const auto of_type = [&](const auto* data) {
    return f([data, stride = t.stride()](int64_t row, int64_t column) -> int64_t {
      return data[row * stride + column];
    });
  };
  return t.type() == DType::kInt32 ? of_type(static_cast<const int32_t*>(t.data))
                                   : of_type(static_cast<const int64_t*>(t.data));
}

// Every index is -1 or a row in use, and there are as many as rows in use: an output scattered by
// them is written whole. That no row is named twice is the plan's promise and is not looked for.
void check_scatter(ArgumentCheck& check, const TensorView& scatter_idx, const Groups& groups) {
  if (!check.reads_values()) return;
  const int64_t used = rows_in_use(groups);
  if (!check.indices("scatter_idx", scatter_idx, scatter_idx.num_elements(), -1, used)) return;
  const int64_t k = scatter_idx.shape[1], tokens = k == 0 ? 0 : scatter_idx.shape[0];
  int64_t routed = 0;
  with_indices(scatter_idx, [&](const auto& row_of) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t j = 0; j < k; ++j) routed += row_of(t, j) >= 0;
    }
  });
  check.require(routed == used, "scatter_idx names ", routed, " rows but the groups have ", used,
                ", must be those of the same plan");
}

// Of indices that have passed check_scatter, and gather_idx its own check: each row in use is named
// by the token that it is gathered from, so that scatter_idx is the inverse of gather_idx.
void check_inverse(ArgumentCheck& check, const TensorView& gather_idx,
                   const TensorView& scatter_idx, const Groups& groups) {
  if (!check.reads_values()) return;
  const int64_t used = rows_in_use(groups), k = scatter_idx.shape[1];
  with_indices(gather_idx, [&](const auto& token_of) {
    with_indices(scatter_idx, [&](const auto& row_of) {
      for (int64_t row = 0; row < used; ++row) {
        const int64_t token = token_of(0, row);
        int64_t j = 0;
        while (j < k && row_of(token, j) != row) ++j;
        if (j < k) continue;
        check.require(false, "row ", row, " is gathered from token ", token, " but scatter_idx[",
                      token, "] does not name it; scatter_idx must be the inverse of gather_idx");
        return;
      }
    });
  });
}

void check_rows(ArgumentCheck& check, const PermuteArgs& args) {
  const TensorView x = args.x, gather_idx = args.gather_idx;
  const NamedSize capacity{"capacity", args.groups.capacity};
  if (!check.ranked("x", x, kFloatTypes, 2)) return;
  check.tensor("gather_idx", gather_idx, kIndexTypes, {capacity});
  check.tensor("rows", args.rows, kFloatTypes, {capacity, {"H", x.shape[1]}});
  check.same_dtype("x", x, "rows", args.rows);
  check.indices("gather_idx", gather_idx, check.rows_in_use(args.groups), 0, x.shape[0]);
}

void check_probs(ArgumentCheck& check, const PermuteArgs& args) {
  const TensorView x = args.x, topk_weights = args.topk_weights;
  if (!check.ranked("topk_weights", topk_weights, kFP32Only, 2)) return;
  const NamedSize tokens{"T", topk_weights.shape[0]}, k{"k", topk_weights.shape[1]};
  check.tensor("scatter_idx", args.scatter_idx, kIndexTypes, {tokens, k});
  check.tensor("probs", args.probs, kFP32Only, {{"capacity", args.groups.capacity}});
  check.require(!x.is_present() || x.shape[0] == tokens.size, "x is ", x, " but topk_weights is ",
                topk_weights, ": both must have the same number of tokens");
  check_scatter(check, args.scatter_idx, args.groups);
}

void validate(ArgumentCheck& check, const PermuteArgs& args) {
  const bool moves_rows = is_present(args.x) || is_present(args.rows);
  const bool moves_probs = is_present(args.topk_weights) || is_present(args.probs);
  check.require(moves_rows || moves_probs,
                "there is nothing to do: x and rows, or topk_weights, scatter_idx and probs, must "
                "be present");
  if (check.ok() && moves_rows) check_rows(check, args);
  if (check.ok() && moves_probs) check_probs(check, args);
  if (moves_rows && moves_probs) {
    check_inverse(check, args.gather_idx, args.scatter_idx, args.groups);
  }
}

void validate(ArgumentCheck& check, const UnpermuteArgs& args) {
  const TensorView rows = args.rows, y = args.y, probs = args.probs, scatter_idx = args.scatter_idx;
  const bool sums = is_present(rows) || is_present(y) || is_present(args.weights);
  const bool moves_weights = is_present(probs) || is_present(args.topk_weights);
  check.require(sums || moves_weights,
                "there is nothing to do: rows and y, or probs and topk_weights, must be present");
  if (!check.ranked("scatter_idx", scatter_idx, kIndexTypes, 2)) return;
  const NamedSize tokens{"T", scatter_idx.shape[0]}, k{"k", scatter_idx.shape[1]};
  if (sums && check.ranked("rows", rows, kFloatTypes, 2)) {
    check.optional_tensor("weights", args.weights, kFP32Only, {tokens, k});
    check.tensor("y", y, kFloatTypes, {tokens, {"H", rows.shape[1]}});
    check.require(y.type() == rows.type() || y.type() == DType::kFP32, "y is ", y, " but rows is ",
                  rows, ": y must have the dtype of rows, or fp32");
    check.indices("scatter_idx", scatter_idx, scatter_idx.num_elements(), -1, rows.shape[0]);
  }
  if (moves_weights && check.ranked("probs", probs, kFP32Only, 1)) {
    check.tensor("topk_weights", args.topk_weights, kFP32Only, {tokens, k});
    check.require(!is_present(rows) || rows.shape[0] == probs.shape[0], "rows is ", rows,
                  " but probs is ", probs, ": both must have the same capacity");
    check.indices("scatter_idx", scatter_idx, scatter_idx.num_elements(), -1, probs.shape[0]);
  }
}

void validate(ArgumentCheck& check, const UnpermuteBackwardArgs& args) {
  const TensorView grad_y = args.grad_y, scatter_idx = args.scatter_idx;
  check.ranked("grad_y", grad_y, kFloatTypes, 2);
  if (!check.ranked("scatter_idx", scatter_idx, kIndexTypes, 2)) return;
  const NamedSize tokens{"T", scatter_idx.shape[0]}, k{"k", scatter_idx.shape[1]};
  const NamedSize capacity{"capacity", args.groups.capacity}, h{"H", grad_y.shape[1]};
  check.require(tokens.size == grad_y.shape[0], "scatter_idx is ", scatter_idx, " but grad_y is ",
                grad_y, ": both must have the same number of tokens");
  check.optional_tensor("weights", args.weights, kFP32Only, {tokens, k});
  check.optional_tensor("grad_rows", args.grad_rows, kFloatTypes, {capacity, h});
  check.same_dtype("grad_y", grad_y, "grad_rows", args.grad_rows);
  if (is_present(args.grad_weights)) {
    check.tensor("rows", args.rows, kFloatTypes, {capacity, h});
    check.tensor("grad_weights", args.grad_weights, kFP32Only, {tokens, k});
  }
  check_scatter(check, scatter_idx, args.groups);
}

std::string problem_of(const PermuteArgs& args) {
  return concat(args.groups.num_groups, " groups, capacity ", args.groups.capacity, ", ",
                is_present(args.rows) ? args.rows : args.probs);
}

std::string problem_of(const TensorView& scatter_idx, const TensorView& subject) {
  return concat(scatter_idx.shape[0], " tokens, top ", scatter_idx.shape[1], ", ", subject);
}

std::string problem_of(const UnpermuteArgs& args) {
  return problem_of(args.scatter_idx, is_present(args.rows) ? args.rows : args.probs);
}

std::string problem_of(const UnpermuteBackwardArgs& args) {
  return problem_of(args.scatter_idx, args.grad_y);
}

// A token that several rows copy has to be read once.
int64_t bytes_read_of(const PermuteArgs& args) {
  const int64_t tokens = TensorView(args.x).num_bytes();
  return bytes_read(args) - tokens + std::min(tokens, TensorView(args.rows).num_bytes());
}

// Of the capacity's rows and probs, one for each top-k entry.
int64_t bytes_read_of(const UnpermuteArgs& args) {
  const TensorView scatter_idx(args.scatter_idx), rows(args.rows), probs(args.probs);
  const int64_t row_bytes = rows.columns() * dtype_size(rows.type());
  const int64_t prob_bytes = is_present(args.probs) ? dtype_size(DType::kFP32) : 0;
  return bytes_read(args) - rows.num_bytes() - probs.num_bytes() +
         scatter_idx.num_elements() * (row_bytes + prob_bytes);
}

}  // namespace

MOIRE_DEFINE_OP(router)
MOIRE_DEFINE_OP(router_backward)
MOIRE_DEFINE_OP_WITH_WORKSPACE(permute_plan)
MOIRE_DEFINE_OP(permute, bytes_read_of)
MOIRE_DEFINE_OP(unpermute, bytes_read_of)
MOIRE_DEFINE_OP(unpermute_backward)

}  // namespace moire
