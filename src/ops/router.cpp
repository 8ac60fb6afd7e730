// router and its gradient: validation and dispatch. Main paths: router, router_backward.
#include <moire/routing.h>

#include <cmath>
#include <limits>

#include "ops/dispatch.h"

namespace moire {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// What both passes share: logits [T, E], k of them chosen, the kind of scores and their scale.
template <class A>
bool check_choice(ArgumentCheck& check, const A& args) {
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
  check.enumerator("kind", args.kind, 2);
  check.enumerator("normalize", args.normalize, 2);
  return check.require(std::isfinite(args.scale), "scale is ", args.scale, ", must be finite");
}

void validate(ArgumentCheck& check, const RouterArgs& args) {
  if (!check_choice(check, args)) return;
  const TensorView logits = args.logits, topk_idx = args.topk_idx, topk_weights = args.topk_weights,
                   expert_bias = args.expert_bias;
  check.optional_tensor("expert_bias", expert_bias, kFP32Only, {{"E", logits.shape[1]}});
  check.tensor("topk_weights", topk_weights, kFP32Only,
               {{"T", topk_idx.shape[0]}, {"k", topk_idx.shape[1]}});
}

void validate(ArgumentCheck& check, const RouterBackwardArgs& args) {
  if (!check_choice(check, args)) return;
  const TensorView logits = args.logits, topk_idx = args.topk_idx,
                   grad_topk_weights = args.grad_topk_weights, grad_logits = args.grad_logits;
  check.tensor("grad_topk_weights", grad_topk_weights, kFP32Only,
               {{"T", topk_idx.shape[0]}, {"k", topk_idx.shape[1]}});
  check.tensor("grad_logits", grad_logits, kFloatTypes,
               {{"T", logits.shape[0]}, {"E", logits.shape[1]}});
  check.indices("topk_idx", topk_idx, topk_idx.num_elements(), 0, logits.shape[1]);
}

template <class A>
std::string problem_of(const A& args) {
  return concat(args.topk_idx.shape[1], " of ", args.logits.shape[1], " experts, ", args.logits);
}

}  // namespace

MOIRE_DEFINE_OP(router)
MOIRE_DEFINE_OP(router_backward)

}  // namespace moire
