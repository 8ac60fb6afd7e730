// The grouped linear layer: y = x W^T (+ scale * bias), and its gradients; each is one op, after
// what a recipe quantises.
#include <moire/grouped_mlp.h>

#include "core/argument_check.h"
#include "mlp/composite.h"
#include "mlp/recipe.h"
#include "mlp/recipe_check.h"

namespace moire {
namespace {

void validate(ArgumentCheck& check, const GroupedLinearArgs& args) {
  const Groups groups(args.groups);
  if (!check_recipe(check, args)) return;
  const Recipe recipe(args);
  const GivenWeight w{"w", args.w, args.w_quantized, args.w_prepared};
  const NamedSize capacity{"capacity", groups.capacity}, num_groups{"G", groups.num_groups};
  const NamedSize in{"in", w.in_features()}, out{"out", w.out_features()};
  check.groups(groups);
  check_weight(check, recipe, w, true, num_groups, out, in);
  check_forward_operand(check, recipe, args, groups, in);
  if (!recipe.is_quantized) check.same_dtype("x", args.x, "w", args.w.tensor);
  check.optional_tensor("bias", args.bias, kFloatTypes, {num_groups, out});
  check.optional_tensor("scale", args.scale, kFP32Only, {capacity});
  check.require(!is_present(args.scale) || is_present(args.bias),
                "scale is present but bias is absent: it would scale nothing");
  check.tensor("y", args.y, kFloatTypes, {capacity, out});
}

void run_steps(Steps& steps, const GroupedLinearArgs& args) {
  const Recipe recipe(args, !steps.on_cpu());
  const WeightOperand w =
      weight_operand(steps, recipe, {"w", args.w, args.w_quantized, args.w_prepared}, true);
  const RaggedOperand x = forward_operand(steps, recipe, {args.x, args.row_idx, args.x_scales},
                                          args.groups, args.x_columnwise);
  GroupedGemmArgs gemm = gemm_args(x, w, args.y, args.groups, args.tail, recipe.accumulation);
  gemm.bias = args.bias;
  gemm.bias_scale = args.scale;
  steps.run(grouped_gemm, grouped_gemm_workspace, gemm);
}

void validate(ArgumentCheck& check, const GroupedLinearBackwardArgs& args) {
  const Groups groups(args.groups);
  const TensorView grad_y(args.grad_y), grad_x(args.grad_x), grad_bias(args.grad_bias),
      grad_scale(args.grad_scale);
  const Weight grad_w(args.grad_w);
  if (!check_recipe(check, args)) return;
  const Recipe recipe(args);
  const GivenWeight w{"w", args.w, args.w_quantized, args.w_prepared};
  const NamedSize capacity{"capacity", groups.capacity}, num_groups{"G", groups.num_groups};
  const NamedSize out{"out",
                      columns_of({grad_y, args.grad_y_rowwise.data, args.grad_y_columnwise.data})};
  check.groups(groups);
  check_grad_y(check, recipe, args, groups, out, grad_x.is_present(), grad_w.is_present(),
               grad_bias.is_present() || grad_scale.is_present());
  // x comes last: without grad_w nothing of it is read.
  const int64_t in_of_x = columns_of({args.grad_x, args.x_columnwise.data, args.x});
  const NamedSize in{"in", agreed_size(in_of_x, w.in_features(), grad_w.in_features())};
  if (grad_x.is_present()) {
    check.tensor("grad_x", grad_x, kFloatTypes, {capacity, in});
    check_weight(check, recipe, w, false, num_groups, out, in);
    if (!recipe.is_quantized) check.same_dtype("grad_y", grad_y, "w", args.w.tensor);
  }
  if (grad_w.is_present()) {
    check.weight("grad_w", grad_w, kFloatTypes, num_groups, out, in);
    check_copy(check, recipe, "x_columnwise", args.x_columnwise, MOIRE_COLUMNWISE, groups, in.size);
    if (!is_present(args.x_columnwise)) {
      check.ragged("x", args.x, "row_idx", args.row_idx, groups, in);
    }
    if (!recipe.is_quantized) check.same_dtype("grad_y", grad_y, "x", args.x);
  }
  check.optional_tensor("scale", args.scale, kFP32Only, {capacity});
  check.optional_tensor("grad_bias", grad_bias, kFloatTypes, {num_groups, out});
  if (grad_scale.is_present()) {
    check.tensor("grad_scale", grad_scale, kFP32Only, {capacity});
    check.tensor("bias", args.bias, kFloatTypes, {num_groups, out});
  }
  check.betas("beta_per_group", args.beta_per_group, groups);
}

void run_steps(Steps& steps, const GroupedLinearBackwardArgs& args) {
  const Recipe recipe(args, !steps.on_cpu());
  const bool needs_grad_x = is_present(args.grad_x), needs_grad_w = is_present(args.grad_w);
  WeightOperand w;
  if (needs_grad_x) {
    w = weight_operand(steps, recipe, {"w", args.w, args.w_quantized, args.w_prepared}, false);
  }
  BiasBackwardArgs bias = bias_args(args.scale, args.grad_bias, args.beta, args.groups, args.tail);
  bias.beta_per_group = args.beta_per_group;
  bias.grad_scale = args.grad_scale;
  if (is_present(args.grad_scale)) bias.bias = args.bias;
  const GradY grad_y =
      grad_y_operands(steps, recipe, given_grad_y(args), args.groups, args.grad_y_rowwise,
                      args.grad_y_columnwise, needs_grad_x, needs_grad_w, bias);
  RaggedOperand x;
  if (needs_grad_w) {
    x = wgrad_operand(steps, recipe, {args.x, args.row_idx}, args.groups, args.x_columnwise);
  }
  sum_bias(steps, grad_y, bias);
  if (needs_grad_x) {
    steps.run(grouped_gemm, grouped_gemm_workspace,
              dgrad_args(grad_y.rows, w, args.grad_x, args.groups, args.tail, recipe.accumulation));
  }
  if (needs_grad_w) {
    steps.run(grouped_gemm_wgrad, grouped_gemm_wgrad_workspace,
              wgrad_args(grad_y.columns, x, args.grad_w, args.beta, args.beta_per_group,
                         args.groups, recipe.accumulation));
  }
}

}  // namespace

MOIRE_DEFINE_COMPOSITE(grouped_linear)
MOIRE_DEFINE_COMPOSITE(grouped_linear_backward)

}  // namespace moire
