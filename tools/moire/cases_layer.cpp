// The grouped linear layer and the grouped MLP; a backward reads what its forward saved.
#include <memory>
#include <utility>

#include "before.h"
#include "cases.h"
#include "reference/grouped_mlp.h"
#include "reference/recipe.h"

namespace moire::tool {
namespace {

using TailRule = Comparison::TailRule;

int64_t copy_bytes(const moire_quantized& q) {
  return TensorView(q.data).num_bytes() + TensorView(q.scales).num_bytes();
}

double layer_flops(const Problem& p) {
  return 6.0 * static_cast<double>(p.rows) * static_cast<double>(p.hidden) *
         static_cast<double>(p.ffn);
}

// The reference of an FP8 layer runs after the call, on all rows: a row of weights' blocks does
// not stand for itself.
Call without_rows_alone(Call call, int32_t recipe) {
  if (recipe != MOIRE_RECIPE_AS_STORED) call.expect_row = nullptr;
  return call;
}

// Whether the reference has to see what lies between a layer's products: see reference/recipe.h.
bool is_observed(const Operands& o) {
  return o.is_judged() && o.problem().quantization != Quantization::kNone;
}

// What the forward keeps for the backward in FP8; absent where the recipe has none.
moire_quantized kept_copy(Operands& o, const std::string& name, int64_t columns) {
  return o.quantized_output(name, Operands::Kind::kActivation, columns, MOIRE_COLUMNWISE);
}

GroupedMlpArgs mlp_args(Operands& o, bool saves) {
  const Problem& p = o.problem();
  auto args = args_of<GroupedMlpArgs>(o);
  args.x = o.gathered("x", p.hidden);
  args.row_idx = o.row_idx();
  args.w1 = o.weight("w1", 2 * p.ffn, p.hidden);
  args.b1 = o.bias("b1", 2 * p.ffn);
  args.w2 = o.weight("w2", p.hidden, p.ffn);
  args.b2 = o.bias("b2", p.hidden);
  args.probs = o.probs();
  const bool observed = is_observed(o);
  if (saves || observed) args.z = o.output("z", p.dtype, {p.capacity(), 2 * p.ffn});
  if ((saves && p.save_act) || observed) {
    args.act = o.output("act", p.dtype, {p.capacity(), p.ffn});
  }
  if (saves && p.x_columnwise) args.x_columnwise = kept_copy(o, "x_columnwise", p.hidden);
  if (saves && p.act_columnwise) args.act_columnwise = kept_copy(o, "act_columnwise", p.ffn);
  args.y = o.output("y", p.stored(), {p.capacity(), p.hidden});
  return args;
}

void compare(Comparison& c, const GroupedMlpArgs& a, const reference::MlpResults& want) {
  c.ragged("y", a.y, want.y, c.tail_rule());
  c.ragged("z", a.z, want.z, TailRule::kUntouched);
  c.ragged("act", a.act, want.act, TailRule::kAnything);
  c.copies("x", a, a.x, a.row_idx, {}, a.x_columnwise, TailRule::kUntouched);
  c.copies("act", a, a.act, {}, {}, a.act_columnwise, TailRule::kUntouched);
}

Call mlp_forward(const Problem& p, const GroupedMlpArgs& args) {
  Call call = make_call<GroupedMlpArgs>(
      args,
      [](const GroupedMlpArgs& a) -> Call::Judge {
        if (a.recipe != MOIRE_RECIPE_AS_STORED) {
          return [a](Comparison& c) { compare(c, a, reference::quantized_mlp(a)); };
        }
        return [a, want = reference::grouped_mlp(a)](Comparison& c) { compare(c, a, want); };
      },
      layer_flops(p));
  call.saved = {{"z", TensorView(args.z).num_bytes()},
                {"act", TensorView(args.act).num_bytes()},
                {"x_columnwise", copy_bytes(args.x_columnwise)},
                {"act_columnwise", copy_bytes(args.act_columnwise)}};
  return without_rows_alone(std::move(call), args.recipe);
}

GroupedMlpBackwardArgs mlp_backward_args(Operands& o, const GroupedMlpArgs& forward) {
  const Problem& p = o.problem();
  auto args = args_of<GroupedMlpBackwardArgs>(o);
  args.x = forward.x;
  args.row_idx = forward.row_idx;
  args.w1 = forward.w1;
  args.w2 = forward.w2;
  args.b2 = forward.b2;
  args.probs = forward.probs;
  args.z = forward.z;
  args.x_columnwise = forward.x_columnwise;
  args.act_columnwise = forward.act_columnwise;
  args.act_is_saved = p.save_act || is_present(forward.act_columnwise) ? 1 : 0;
  if (args.act_is_saved != 0) args.act = forward.act;
  if (is_observed(o)) {
    args.grad_z = o.output("grad_z", p.dtype, {p.capacity(), 2 * p.ffn});
    if (args.act_is_saved == 0) args.act = o.output("act again", p.dtype, {p.capacity(), p.ffn});
  }
  args.grad_y = o.gathered("grad_y", p.hidden);
  args.grad_x = o.output("grad_x", p.stored(), {p.capacity(), p.hidden});
  args.grad_w1 = o.weight_gradient("grad_w1", 2 * p.ffn, p.hidden);
  args.grad_w2 = o.weight_gradient("grad_w2", p.hidden, p.ffn);
  args.beta_w1 = args.beta_w2 = args.beta_bias = p.beta == 1 ? 1 : 0;
  args.beta_w1_per_group = args.beta_w2_per_group = o.beta_per_group();
  if (p.bias) {
    const bool adds = args.beta_bias != 0;
    args.grad_b1 = o.accumulator("grad_b1", o.wgrad_dtype(), {p.groups, 2 * p.ffn}, adds);
    args.grad_b2 = o.accumulator("grad_b2", o.wgrad_dtype(), {p.groups, p.hidden}, adds);
  }
  if (p.probs) args.grad_probs = o.output("grad_probs", DType::kFP32, {p.capacity()});
  return args;
}

void compare(Comparison& c, const GroupedMlpBackwardArgs& a, const reference::MlpGradients& want) {
  c.ragged("grad_x", a.grad_x, want.grad_x, c.tail_rule());
  c.weights("grad_w1", a.grad_w1, want.grad_w1);
  c.weights("grad_w2", a.grad_w2, want.grad_w2);
  c.per_group("grad_b1", a.grad_b1, want.grad_b1);
  c.per_group("grad_b2", a.grad_b2, want.grad_b2);
  c.ragged("grad_probs", a.grad_probs, want.grad_probs, c.tail_rule());
}

Call mlp_backward(const Problem& p, const GroupedMlpBackwardArgs& args) {
  Call call = make_call<GroupedMlpBackwardArgs>(
      args,
      [](const GroupedMlpBackwardArgs& a) -> Call::Judge {
        if (a.recipe == MOIRE_RECIPE_AS_STORED) {
          return [a, want = reference::grouped_mlp_backward(a)](Comparison& c) {
            compare(c, a, want);
          };
        }
        auto before = std::make_shared<Before>();
        GroupedMlpBackwardArgs b = a;
        b.grad_w1 = before->of(a.grad_w1);
        b.grad_w2 = before->of(a.grad_w2);
        b.grad_b1 = before->of(a.grad_b1);
        b.grad_b2 = before->of(a.grad_b2);
        return [a, b, before](Comparison& c) {
          const reference::MlpGradients want = reference::quantized_mlp_backward(b);
          c.ragged("grad_z", a.grad_z, want.grad_z, TailRule::kAnything);
          compare(c, a, want);
        };
      },
      2 * layer_flops(p));
  return without_rows_alone(std::move(call), args.recipe);
}

Call linear_forward(const Problem& p, const GroupedLinearArgs& args) {
  Call call = make_call<GroupedLinearArgs>(
      args,
      [](const GroupedLinearArgs& a) {
        const bool as_stored = a.recipe == MOIRE_RECIPE_AS_STORED;
        return [a, want = as_stored ? reference::grouped_linear(a)
                                    : reference::quantized_linear(a)](Comparison& c) {
          c.ragged("y", a.y, want, c.tail_rule());
          c.copies("x", a, a.x, a.row_idx, {}, a.x_columnwise, TailRule::kUntouched);
        };
      },
      layer_flops(p) * 2 / 3);
  call.saved = {{"x_columnwise", copy_bytes(args.x_columnwise)}};
  return call;
}

Call linear_backward(const Problem& p, const GroupedLinearBackwardArgs& args) {
  return make_call<GroupedLinearBackwardArgs>(
      args,
      [](const GroupedLinearBackwardArgs& a) {
        const bool as_stored = a.recipe == MOIRE_RECIPE_AS_STORED;
        return [a, want = as_stored ? reference::grouped_linear_backward(a)
                                    : reference::quantized_linear_backward(a)](Comparison& c) {
          c.ragged("grad_x", a.grad_x, want.grad_x, c.tail_rule());
          c.weights("grad_w", a.grad_w, want.grad_w);
          c.per_group("grad_bias", a.grad_bias, want.grad_bias);
          c.ragged("grad_scale", a.grad_scale, want.grad_scale, c.tail_rule());
        };
      },
      2 * layer_flops(p) * 2 / 3);
}

// FC1's shape, with a per-row scale of the bias.
Case linear_case(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<GroupedLinearArgs>(o);
  args.x = o.gathered("x", p.hidden);
  args.row_idx = o.row_idx();
  args.w = o.weight("w1", 2 * p.ffn, p.hidden);
  args.bias = o.bias("b1", 2 * p.ffn);
  if (p.bias) args.scale = o.probs();
  args.y = o.output("y", p.stored(), {p.capacity(), 2 * p.ffn});
  if (p.x_columnwise) args.x_columnwise = kept_copy(o, "x_columnwise", p.hidden);
  auto back = args_of<GroupedLinearBackwardArgs>(o);
  back.x_columnwise = args.x_columnwise;
  back.x = args.x;
  back.row_idx = args.row_idx;
  back.w = args.w;
  back.bias = args.bias;
  back.scale = args.scale;
  back.grad_y = o.gathered("grad_y", 2 * p.ffn);
  back.grad_x = o.output("grad_x", p.stored(), {p.capacity(), p.hidden});
  back.grad_w = o.weight_gradient("grad_w1", 2 * p.ffn, p.hidden);
  if (p.bias) {
    back.grad_bias = o.accumulator("grad_b1", o.wgrad_dtype(), {p.groups, 2 * p.ffn}, p.beta != 0);
    if (p.probs) back.grad_scale = o.output("grad_scale", DType::kFP32, {p.capacity()});
  }
  return {{linear_forward(p, args), linear_backward(p, back)}};
}

}  // namespace

MlpArgs make_mlp_args(Operands& operands) {
  const GroupedMlpArgs forward = mlp_args(operands, true);
  return {forward, mlp_backward_args(operands, forward)};
}

Case make_layer_case(Operands& operands) {
  const Problem& p = operands.problem();
  if (p.op == Op::kLinear) return linear_case(operands);
  const bool trains = p.op == Op::kMlp;
  const GroupedMlpArgs args = mlp_args(operands, trains);
  Case out{{mlp_forward(p, args)}};
  if (trains) out.calls.push_back(mlp_backward(p, mlp_backward_args(operands, args)));
  return out;
}

}  // namespace moire::tool
