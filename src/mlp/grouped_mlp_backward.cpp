// The grouped MLP, backward. From grad_y: FC2 dgrad with the activation's backward in its epilogue
// (grad_z, grad_probs, grad_b1, act again), FC1 dgrad, and the two weight gradients; only the steps
// whose outputs are asked for.
#include "mlp/grouped_mlp_backward.h"

#include <moire/grouped_mlp.h>

#include "mlp/validate.h"

namespace moire {
namespace {

// What lies between the products: as stored, or as the copies that the next ones read.
struct Between {
  TensorView grad_z, act;
  moire_quantized grad_z_rowwise = {}, grad_z_columnwise = {}, act_columnwise = {};
};

GroupedGemmGluBackwardArgs fc2_dgrad_args(const GroupedMlpBackwardArgs& args, const Recipe& recipe,
                                          const RaggedOperand& grad_y, const WeightOperand& w2,
                                          const Between& between) {
  GroupedGemmGluBackwardArgs gemm;
  gemm.grad_y = grad_y.tensor;
  gemm.row_idx = grad_y.row_idx;
  gemm.grad_y_scales = grad_y.scales;
  gemm.w2 = w2.weight;
  gemm.w2_scales = w2.scales;
  gemm.accumulation = recipe.accumulation;
  gemm.fractional_scales = recipe.fractional_scales;
  gemm.z = args.z;
  gemm.probs = args.probs;
  gemm.grad_z = between.grad_z;
  gemm.grad_z_rowwise = between.grad_z_rowwise;
  gemm.grad_z_columnwise = between.grad_z_columnwise;
  if (args.act_is_saved == 0) {
    gemm.act = between.act;
    gemm.act_columnwise = between.act_columnwise;
  }
  gemm.grad_probs = args.grad_probs;
  gemm.grad_bias = args.grad_b1;
  gemm.beta = args.beta_bias;
  gemm.groups = args.groups;
  gemm.activation = args.activation;
  gemm.layout = args.layout;
  // grad_z and act are internals, whose tails keep whatever was there; grad_probs alone is an
  // output.
  gemm.tail = args.tail;
  return gemm;
}

GluArgs act_args(const GroupedMlpBackwardArgs& args, const TensorView& act) {
  GluArgs glu_args;
  glu_args.z = args.z;
  glu_args.probs = args.probs;
  glu_args.act = act;
  glu_args.groups = args.groups;
  glu_args.activation = args.activation;
  glu_args.layout = args.layout;
  glu_args.tail = MOIRE_TAIL_UNTOUCHED;
  return glu_args;
}

// grad_b2, and the share of grad_probs that comes through probs * b2, added to what FC2's dgrad
// wrote.
BiasBackwardArgs b2_args(const GroupedMlpBackwardArgs& args, const RaggedOperand& grad_y,
                         bool scale_from_b2) {
  BiasBackwardArgs bias;
  bias.grad_y = grad_y.tensor;
  bias.row_idx = grad_y.row_idx;
  bias.scale = args.probs;
  bias.grad_bias = args.grad_b2;
  bias.beta = args.beta_bias;
  if (scale_from_b2) {
    bias.bias = args.b2;
    bias.grad_scale = args.grad_probs;
    bias.beta_scale = 1;
  }
  bias.groups = args.groups;
  bias.tail = args.tail;
  return bias;
}

// Memory for what the products leave to each other and the caller did not give.
Between take_between(const GroupedMlpBackwardArgs& args, const Recipe& recipe,
                     const MlpBackwardNeeds& needs, Arena& arena) {
  const TensorView z(args.z);
  const int64_t capacity = args.groups.capacity, num_groups = args.groups.num_groups;
  const int64_t two_f = z.columns();
  Between b{args.grad_z, args.act, {}, args.grad_z_columnwise, args.act_columnwise};
  const auto take = [&](moire_quantized* copy, DType element, int32_t direction, int64_t columns) {
    if (is_present(*copy)) return;
    *copy = take_copy(arena, recipe, element, direction, capacity, columns, num_groups);
  };
  if (recipe.is_quantized) {
    const DType gradient = recipe.gradient_dtype;
    if (is_present(args.grad_x)) take(&b.grad_z_rowwise, gradient, MOIRE_ROWWISE, two_f);
    if (is_present(args.grad_w1)) take(&b.grad_z_columnwise, gradient, MOIRE_COLUMNWISE, two_f);
    if (is_present(args.grad_w2)) {
      take(&b.act_columnwise, DType::kE4M3, MOIRE_COLUMNWISE, two_f / 2);
    }
  }
  const bool grad_z_is_copied = is_present(b.grad_z_rowwise) || is_present(b.grad_z_columnwise);
  if (needs.grad_z && !grad_z_is_copied && !b.grad_z.is_present()) {
    b.grad_z = arena.take(z.type(), capacity, two_f);
  }
  const bool act_is_copied = needs.grad_z && is_present(b.act_columnwise);
  if (needs.makes_act && !act_is_copied && !b.act.is_present()) {
    b.act = arena.take(z.type(), capacity, two_f / 2);
  }
  return b;
}

// As stored, or the copy that a recipe's products read.
RaggedOperand operand_between(const Recipe& recipe, const TensorView& stored,
                              const moire_quantized& copy) {
  return recipe.is_quantized ? operand_of(copy) : RaggedOperand{stored};
}

void run_steps(Steps& steps, const GroupedMlpBackwardArgs& args) {
  const Recipe recipe(args);
  const MlpBackwardNeeds needs(args);
  const moire_groups& groups = args.groups;
  const bool needs_w1 = is_present(args.grad_w1), needs_w2 = is_present(args.grad_w2),
             needs_x = is_present(args.grad_x);
  const Between between = take_between(args, recipe, needs, steps.arena);
  WeightOperand w1, w2;
  const GivenWeight given_w1{"w1", args.w1, args.w1_quantized, args.w1_prepared};
  const GivenWeight given_w2{"w2", args.w2, args.w2_quantized, args.w2_prepared};
  if (needs_x) w1 = weight_operand(steps, recipe, given_w1, false);
  if (needs.grad_z) w2 = weight_operand(steps, recipe, given_w2, false);
  const GradY grad_y =
      grad_y_operands(steps, recipe, given_grad_y(args), groups, args.grad_y_rowwise,
                      args.grad_y_columnwise, needs.grad_z, needs_w2);
  RaggedOperand x;
  if (needs_w1) {
    x = wgrad_operand(steps, recipe, {args.x, args.row_idx}, groups, args.x_columnwise);
  }
  if (needs.grad_z) {
    steps.run(grouped_gemm_glu_backward, grouped_gemm_glu_backward_workspace,
              fc2_dgrad_args(args, recipe, grad_y.rows, w2, between));
  } else if (needs.makes_act) {
    steps.run(glu, act_args(args, between.act));
  }
  const bool act_is_copied =
      args.act_is_saved != 0 ? is_present(args.act_columnwise) : needs.makes_act && needs.grad_z;
  if (recipe.is_quantized && !act_is_copied) {
    quantize_operand(steps, recipe, {between.act}, groups, {}, between.act_columnwise, "act");
  }
  if (needs.b2) {
    steps.run(bias_backward, bias_backward_workspace,
              b2_args(args, grad_y.itself, needs.scale_from_b2));
  }
  if (needs_w2) {
    const RaggedOperand act = operand_between(recipe, between.act, between.act_columnwise);
    steps.run(grouped_gemm_wgrad, grouped_gemm_wgrad_workspace,
              wgrad_args(grad_y.columns, act, args.grad_w2, args.beta_w2, args.beta_w2_per_group,
                         groups, recipe.accumulation));
  }
  if (needs_x) {
    const RaggedOperand grad_z = operand_between(recipe, between.grad_z, between.grad_z_rowwise);
    steps.run(grouped_gemm, grouped_gemm_workspace,
              dgrad_args(grad_z, w1, args.grad_x, groups, args.tail, recipe.accumulation));
  }
  if (needs_w1) {
    const RaggedOperand grad_z = operand_between(recipe, between.grad_z, between.grad_z_columnwise);
    steps.run(grouped_gemm_wgrad, grouped_gemm_wgrad_workspace,
              wgrad_args(grad_z, x, args.grad_w1, args.beta_w1, args.beta_w1_per_group, groups,
                         recipe.accumulation));
  }
}

}  // namespace

MOIRE_DEFINE_COMPOSITE(grouped_mlp_backward)

}  // namespace moire
