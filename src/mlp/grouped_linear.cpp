// The grouped linear layer: y = x W^T (+ scale * bias), and its gradients; each is one op, after
// what a recipe quantises.
#include <moire/grouped_mlp.h>

#include "mlp/composite.h"
#include "mlp/recipe.h"
#include "mlp/recipe_check.h"

namespace moire {
namespace {

void validate(ArgumentCheck& check, const GroupedLinearArgs& args) {
  LayerCheck layer(check, args);
  const auto [capacity, num_groups] = layer.sizes;
  const GivenWeight w = given_w(args);
  const NamedSize in{"in", w.in_features()}, out{"out", w.out_features()};
  layer.weight(w, true, out, in);
  layer.forward_operand(args, in);
  layer.same_dtype("x", args.x, "w", args.w.tensor);
  check.optional_tensor("bias", args.bias, kFloatTypes, {num_groups, out});
  check.optional_tensor("scale", args.scale, kFP32Only, {capacity});
  check.require(!is_present(args.scale) || is_present(args.bias),
                "scale is present but bias is absent: it would scale nothing");
  check.tensor("y", args.y, kFloatTypes, {capacity, out});
}

void run_steps(Steps& steps, const GroupedLinearArgs& args) {
  LayerSteps layer(steps, args);
  const RaggedOperand given{args.x, args.row_idx, args.x_scales};
  const WeightOperand w = layer.weight_operand(given_w(args), true, args.y, given);
  const RaggedOperand x = layer.forward_operand(given, args.x_columnwise, w, args.y);
  layer.run_forward(x, w, args.bias, args.scale, args.y);
}

void validate(ArgumentCheck& check, const GroupedLinearBackwardArgs& args) {
  const Weight grad_w(args.grad_w);
  LayerCheck layer(check, args);
  const auto [capacity, num_groups] = layer.sizes;
  const GivenWeight w = given_w(args);
  const NamedSize out = layer.grad_y(args, "out", is_present(args.grad_x), grad_w.is_present(),
                                     is_present(args.grad_bias) || is_present(args.grad_scale));
  // x comes last: without grad_w nothing of it is read.
  const int64_t in_of_x = columns_of({args.grad_x, columns_as_rows(args), args.x});
  const NamedSize in{"in", agreed_size(in_of_x, w.in_features(), grad_w.in_features())};
  if (is_present(args.grad_x)) {
    check.tensor("grad_x", args.grad_x, kFloatTypes, {capacity, in});
    layer.weight(w, false, out, in);
    layer.same_dtype("grad_y", args.grad_y, "w", args.w.tensor);
  }
  if (grad_w.is_present()) {
    check.weight("grad_w", grad_w, kFloatTypes, num_groups, out, in);
    layer.wgrad_operand(args, in);
    layer.same_dtype("grad_y", args.grad_y, "x", args.x);
  }
  check.optional_tensor("scale", args.scale, kFP32Only, {capacity});
  check.optional_tensor("grad_bias", args.grad_bias, kFloatTypes, {num_groups, out});
  if (is_present(args.grad_scale)) {
    check.tensor("grad_scale", args.grad_scale, kFP32Only, {capacity});
    check.tensor("bias", args.bias, kFloatTypes, {num_groups, out});
  }
}

void run_steps(Steps& steps, const GroupedLinearBackwardArgs& args) {
  LayerSteps layer(steps, args);
  const bool needs_grad_x = is_present(args.grad_x), needs_grad_w = is_present(args.grad_w);
  WeightOperand w;
  if (needs_grad_x) {
    w = layer.weight_operand(given_w(args), false, args.grad_x, operand_of(args.grad_y_rowwise));
  }
  BiasBackwardArgs bias;
  bias.scale = args.scale;
  bias.grad_bias = args.grad_bias;
  bias.beta = args.beta;
  bias.beta_per_group = args.beta_per_group;
  bias.grad_scale = args.grad_scale;
  if (is_present(args.grad_scale)) bias.bias = args.bias;
  const bool cores_make_wgrad =
      layer.cores_make_wgrad(args.grad_w, args.grad_y_columnwise, args.x_columnwise);
  const bool grad_y_for_cores = cores_make_wgrad && layer.cores_multiply(w, false, args.grad_x);
  const GradY grad_y =
      layer.grad_y_operands(GivenGradY(args), needs_grad_x, needs_grad_w, grad_y_for_cores, bias);
  RaggedOperand x;
  if (needs_grad_w)
    x = layer.wgrad_operand({args.x, args.row_idx}, args.x_columnwise, cores_make_wgrad);
  layer.run_bias(grad_y, bias);
  if (needs_grad_x) layer.run_dgrad(grad_y.rows, w, args.grad_x);
  if (needs_grad_w) {
    layer.run_wgrad(grad_y.columns, x, args.grad_w, args.beta, args.beta_per_group);
  }
}

}  // namespace

MOIRE_DEFINE_COMPOSITE(grouped_linear)
MOIRE_DEFINE_COMPOSITE(grouped_linear_backward)

}  // namespace moire
