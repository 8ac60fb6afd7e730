// Router, permute plan, permute and unpermute with their gradients, and the offsets.
#include <set>

#include "cases.h"
#include "reference/routing.h"
#include "text.h"

namespace moire::tool {
namespace {

using reference::Matrix;
using reference::Number;

constexpr float kRouterScale = 2.5F;  // DeepSeek-V3's

int32_t kind_of(const Problem& p) {
  return p.sigmoid ? MOIRE_ROUTER_SIGMOID : MOIRE_ROUTER_SOFTMAX;
}

double token_elements(const Problem& p) {
  return static_cast<double>(p.rows) * static_cast<double>(p.hidden);
}

DType index_dtype(const Problem& p) { return p.seed % 2 == 0 ? DType::kInt32 : DType::kInt64; }

// "" if `got` are k experts by falling score, where scores within their bounds may change places.
std::string judge_choice(const Matrix& scores, int64_t token, const std::vector<int64_t>& got,
                         const std::vector<int64_t>& want) {
  std::set<int64_t> seen;
  for (size_t j = 0; j < got.size(); ++j) {
    const std::string where = text("first at token ", token, ", choice ", j, ": got ", got[j]);
    if (got[j] < 0 || got[j] >= scores.columns) return text(where, ", no expert");
    if (!seen.insert(got[j]).second) return text(where, " twice");
    const Number a = scores.at(token, got[j]), b = scores.at(token, want[j]);
    if (a.value < b.value - a.bound - b.bound || a.value > b.value + a.bound + b.bound) {
      return text(where, " with score ", a.value, ", want ", want[j], " with ", b.value);
    }
  }
  return "";
}

Call::Judge expect_router(const RouterArgs& a) {
  return [a, want = reference::router(a)](Comparison& c) {
    const TensorView idx(a.topk_idx);
    const int64_t k = idx.columns();
    std::vector<int64_t> all;
    std::string found;
    for (int64_t t = 0; t < idx.num_rows() && found.empty(); ++t) {
      std::vector<int64_t> got, wanted;
      for (int64_t j = 0; j < k; ++j) {
        got.push_back(reference::read_index(idx, t, j));
        wanted.push_back(want.topk_idx[static_cast<size_t>(t * k + j)]);
      }
      found = judge_choice(want.choice_scores, t, got, wanted);
      all.insert(all.end(), got.begin(), got.end());
    }
    c.finding("topk_idx", found);
    if (found.empty()) c.plain("topk_weights", a.topk_weights, reference::router_weights(a, all));
  };
}

Call router_call(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<RouterArgs>(o);
  args.logits = o.input("logits", p.dtype, {p.tokens(), p.groups}, 2.0);
  if (p.bias) args.expert_bias = o.input("expert_bias", DType::kFP32, {p.groups}, 0.1);
  args.kind = kind_of(p);
  args.normalize = p.normalize ? 1 : 0;
  args.scale = p.sigmoid ? kRouterScale : 0.0F;
  args.topk_idx = o.output("topk_idx", index_dtype(p), {p.tokens(), p.topk});
  args.topk_weights = o.output("topk_weights", DType::kFP32, {p.tokens(), p.topk});
  return make_call<RouterArgs>(args, expect_router);
}

Call router_backward_call(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<RouterBackwardArgs>(o);
  args.logits = o.input("logits", p.dtype, {p.tokens(), p.groups}, 2.0);
  // Any k different experts will do: a token's are neighbours, from a place that moves on.
  std::vector<int64_t> choices;
  for (int64_t t = 0; o.is_filled() && t < p.tokens(); ++t) {
    for (int64_t j = 0; j < p.topk; ++j) choices.push_back((7 * t + j) % p.groups);
  }
  args.topk_idx = o.index("choices", {p.tokens(), p.topk}, choices);
  args.grad_topk_weights = o.input("grad_topk_weights", DType::kFP32, {p.tokens(), p.topk});
  args.kind = kind_of(p);
  args.normalize = p.normalize ? 1 : 0;
  args.scale = p.sigmoid ? kRouterScale : 0.0F;
  args.grad_logits = o.output("grad_logits", p.dtype, {p.tokens(), p.groups});
  return make_call(args, reference::router_backward,
                   [](Comparison& c, const RouterBackwardArgs& a, const auto& want) {
                     c.plain("grad_logits", a.grad_logits, want);
                   });
}

Call plan_call(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<PermutePlanArgs>(o);
  args.topk_idx = o.topk_idx();
  args.num_groups = p.groups;
  args.offsets = o.output("offsets", DType::kInt64, {p.groups + 1});
  args.gather_idx = o.output("gather_idx", index_dtype(p), {p.capacity()});
  args.scatter_idx = o.output("scatter_idx", index_dtype(p), {p.tokens(), p.topk});
  return make_call(args, reference::permute_plan,
                   [](Comparison& c, const PermutePlanArgs& a, const auto& want) {
                     c.indices("offsets", a.offsets, want.offsets);
                     c.indices("gather_idx", a.gather_idx, want.gather_idx);
                     c.indices("scatter_idx", a.scatter_idx, want.scatter_idx);
                   });
}

Call permute_call(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<PermuteArgs>(o);
  args.x = o.input("x", p.dtype, {p.tokens(), p.hidden});
  args.gather_idx = o.gather_idx();
  args.rows = o.output("rows", p.dtype, {p.capacity(), p.hidden});
  if (p.probs) {
    args.topk_weights = o.topk_weights();
    args.scatter_idx = o.scatter_idx();
    args.probs = o.output("probs", DType::kFP32, {p.capacity()});
  }
  return make_call(args, reference::permute,
                   [](Comparison& c, const PermuteArgs& a, const auto& want) {
                     c.ragged("rows", a.rows, want.rows, c.tail_rule());
                     c.ragged("probs", a.probs, want.probs, c.tail_rule());
                   });
}

Call unpermute_call(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<UnpermuteArgs>(o);
  args.rows = o.ragged("rows", p.dtype, p.hidden);
  args.scatter_idx = o.scatter_idx();
  if (p.probs) {
    args.weights = o.topk_weights();
    args.probs = o.probs();
    args.topk_weights = o.output("grad_topk_weights", DType::kFP32, {p.tokens(), p.topk});
  }
  args.y = o.output("y", o.out_dtype(), {p.tokens(), p.hidden});
  return make_call(
      args, reference::unpermute,
      [](Comparison& c, const UnpermuteArgs& a, const auto& want) {
        c.plain("y", a.y, want.y);
        c.plain("topk_weights", a.topk_weights, want.topk_weights);
      },
      2 * token_elements(p));
}

Call unpermute_backward_call(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<UnpermuteBackwardArgs>(o);
  args.grad_y = o.input("grad_y", p.dtype, {p.tokens(), p.hidden});
  args.rows = o.ragged("rows", p.dtype, p.hidden);
  args.scatter_idx = o.scatter_idx();
  if (p.probs) args.weights = o.topk_weights();
  args.grad_rows = o.output("grad_rows", p.dtype, {p.capacity(), p.hidden});
  args.grad_weights = o.output("grad_weights", DType::kFP32, {p.tokens(), p.topk});
  return make_call(
      args, reference::unpermute_backward,
      [](Comparison& c, const UnpermuteBackwardArgs& a, const auto& want) {
        c.ragged("grad_rows", a.grad_rows, want.grad_rows, c.tail_rule());
        c.plain("grad_weights", a.grad_weights, want.grad_weights);
      },
      3 * token_elements(p));
}

Call offsets_call(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<SplitsToOffsetsArgs>(o);
  args.splits = o.index("splits", {p.groups}, o.splits());
  args.kind = MOIRE_SPLITS;
  args.capacity = p.capacity();
  args.outputs = o.offset_outputs();
  args.num_outputs = Operands::kNumOffsetOutputs;
  return make_call(args, reference::splits_to_offsets,
                   [](Comparison& c, const SplitsToOffsetsArgs& a, const auto& want) {
                     for (size_t i = 0; i < want.size(); ++i) {
                       c.indices(text("output ", i), a.outputs[i].offsets, want[i]);
                     }
                   });
}

}  // namespace

Case make_routing_case(Operands& operands) {
  switch (operands.problem().op) {
    case Op::kRouter:
      return {{router_call(operands)}};
    case Op::kRouterBackward:
      return {{router_backward_call(operands)}};
    case Op::kPermutePlan:
      return {{plan_call(operands)}};
    case Op::kPermute:
      return {{permute_call(operands)}};
    case Op::kUnpermute:
      return {{unpermute_call(operands)}};
    case Op::kUnpermuteBackward:
      return {{unpermute_backward_call(operands)}};
    default:
      return {{offsets_call(operands)}};
  }
}

}  // namespace moire::tool
