// The grouped MLP, backward. From grad_y: FC2 dgrad with the activation's backward in its epilogue
// (grad_z, grad_probs, grad_b1, act again), FC1 dgrad, and the two weight gradients; only the steps
// whose outputs are asked for.
#include <moire/grouped_mlp.h>

#include "mlp/composite.h"
#include "mlp/recipe.h"
#include "mlp/recipe_check.h"

namespace moire {
namespace {

// What a call asks for.
struct MlpBackwardNeeds {
  const GroupedMlpBackwardArgs& args;
  bool grad_z = fields::needs_grad_z(args);  // the FC2 dgrad runs
  // FC2's input again, for its weight gradient or for the caller.
  bool makes_act = args.act_is_saved == 0 && (is_present(args.grad_w2) || is_present(args.act) ||
                                              is_present(args.act_columnwise));
  bool by_probs = fields::probs_scale_b2(args);  // probs is what scales b2
  // The gradient of what scales b2.
  bool b2_scale = is_present(args.grad_b2_scale) ||
                  (by_probs && is_present(args.grad_probs) && is_present(args.b2));
  bool b2 = b2_scale || is_present(args.grad_b2);  // sums of grad_y itself
};

void check_gradients(ArgumentCheck& check, const GroupedMlpBackwardArgs& args, NamedSize h,
                     NamedSize f, NamedSize n) {
  const NamedSize two_f = z_columns(args.layout, f.size);
  const auto [capacity, num_groups] = sizes_of(args.groups);
  check.optional_tensor("grad_x", args.grad_x, kFloatTypes, {capacity, h});
  check.optional_tensor("grad_z", args.grad_z, kFloatTypes, {capacity, two_f});
  check.same_dtype("grad_z", args.grad_z, "z", args.z);
  if (is_present(args.grad_w1)) {
    check.weight("grad_w1", args.grad_w1, kFloatTypes, num_groups, two_f, h);
  }
  if (is_present(args.grad_w2)) {
    check.weight("grad_w2", args.grad_w2, kFloatTypes, num_groups, n, f);
  }
  check.optional_tensor("grad_b1", args.grad_b1, kFloatTypes, {num_groups, two_f});
  check.optional_tensor("grad_b2", args.grad_b2, kFloatTypes, {num_groups, n});
  check.optional_tensor("grad_probs", args.grad_probs, kFP32Only, {capacity});
  check.optional_tensor("grad_b2_scale", args.grad_b2_scale, kFP32Only, {capacity});
  check.require(!is_present(args.grad_b2_scale) || is_present(args.b2_scale),
                "grad_b2_scale is present but b2_scale is absent");
}

void validate(ArgumentCheck& check, const GroupedMlpBackwardArgs& args) {
  const TensorView z(args.z), grad_y(args.grad_y);
  LayerCheck layer(check, args);
  const auto [capacity, num_groups] = layer.sizes;
  const MlpBackwardNeeds needs{args};
  const GivenWeight w1 = given_w1(args), w2 = given_w2(args);
  const NamedSize f{"F", z.columns() / num_halves(args.layout)},
      two_f = z_columns(args.layout, f.size);
  // x comes last: without grad_w1 nothing of it is read.
  const int64_t h_of_x = columns_of({args.grad_x, columns_as_rows(args), args.x});
  const Weight grad_w1(args.grad_w1);
  const NamedSize h{"H", agreed_size(h_of_x, w1.in_features(), grad_w1.in_features())};
  check.tensor("z", z, layer.recipe.types_between(), {capacity, two_f});
  check.gated(args.activation, args.layout, f.size);
  const NamedSize n = layer.grad_y(args, "N", needs.grad_z, is_present(args.grad_w2), needs.b2);
  check.optional_tensor("probs", args.probs, kFP32Only, {capacity});
  check.optional_tensor("b2_scale", args.b2_scale, kFP32Only, {capacity});
  check.require(!is_present(args.b2_scale) || args.b2_unscaled == 0,
                "b2_scale is present but b2_unscaled is 1: it would scale nothing");
  if (needs.grad_z) layer.weight(w2, false, n, f);
  if (is_present(args.grad_x)) layer.weight(w1, false, two_f, h);
  if (is_present(args.grad_w1)) layer.wgrad_operand(args, h);
  layer.same_dtype("grad_y", grad_y, "z", z);
  if (needs.grad_z) layer.same_dtype("w2", args.w2.tensor, "grad_y", grad_y);
  if (is_present(args.grad_x)) layer.same_dtype("w1", args.w1.tensor, "grad_y", grad_y);
  if (is_present(args.grad_w1)) layer.same_dtype("x", args.x, "grad_y", grad_y);
  check.require(args.act_is_saved == 0 || is_present(args.act) || is_present(args.act_columnwise),
                "act_is_saved is 1 but act is absent");
  check.optional_tensor("act", args.act, kFloatTypes, {capacity, f});
  check.same_dtype("act", args.act, "z", z);
  layer.copy("act_columnwise", args.act_columnwise, MOIRE_COLUMNWISE, f);
  layer.copy("grad_z_columnwise", args.grad_z_columnwise, MOIRE_COLUMNWISE, two_f);
  if (needs.b2_scale) check.tensor("b2", args.b2, kFloatTypes, {num_groups, n});
  check_gradients(check, args, h, f, n);
}

// What lies between the products: as stored, or as the copies that the next ones read.
struct Between {
  TensorView grad_z, act;
  moire_quantized grad_z_rowwise = {}, grad_z_columnwise = {}, act_columnwise = {};
};

GroupedGemmGluBackwardArgs fc2_dgrad_args(const GroupedMlpBackwardArgs& args, const Recipe& recipe,
                                          const RaggedOperand& grad_y, const WeightOperand& w2,
                                          const Between& between) {
  GroupedGemmGluBackwardArgs gemm;
  share_activation(gemm, args);
  gemm.grad_y = grad_y.tensor;
  gemm.row_idx = grad_y.row_idx;
  gemm.grad_y_scales = grad_y.scales;
  gemm.w2 = w2.weight;
  gemm.w2_scales = w2.scales;
  gemm.accumulation = recipe.accumulation;
  gemm.fractional_scales = recipe.ragged_scales;
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
  // grad_z and act are internals, whose tails keep whatever was there; grad_probs alone is an
  // output.
  gemm.tail = args.tail;
  return gemm;
}

GluArgs act_args(const GroupedMlpBackwardArgs& args, const TensorView& act) {
  GluArgs glu_args;
  share_activation(glu_args, args);
  glu_args.act = act;
  glu_args.tail = MOIRE_TAIL_UNTOUCHED;
  return glu_args;
}

// What FC2's dgrad makes, in 8-bit recipes.
TensorView grad_act_of(const GroupedMlpBackwardArgs& args) {
  return {nullptr, DType::kBF16, {args.groups.capacity, given_w2(args).in_features()}};
}

// Which copies are made for FP8 tensor cores. Those of one source are, or none.
struct MadeForCores {
  bool grad_y, grad_z, x, act;
};
MadeForCores made_for_cores(const LayerSteps& layer, const GroupedMlpBackwardArgs& args,
                            const MlpBackwardNeeds& needs, const WeightOperand& w1,
                            const WeightOperand& w2) {
  const bool makes_w1 =
      layer.cores_make_wgrad(args.grad_w1, args.grad_z_columnwise, args.x_columnwise);
  const bool makes_w2 =
      layer.cores_make_wgrad(args.grad_w2, args.grad_y_columnwise, args.act_columnwise);
  return {
      .grad_y = makes_w2 && (!needs.grad_z || layer.cores_multiply(w2, false, grad_act_of(args))),
      .grad_z = makes_w1 && !is_present(args.grad_z_columnwise) &&
                layer.cores_multiply(w1, false, args.grad_x),
      .x = makes_w1,
      .act = makes_w2};
}

// Memory for what the products leave to each other and the caller did not give.
Between take_between(LayerSteps& layer, const GroupedMlpBackwardArgs& args,
                     const MlpBackwardNeeds& needs, const MadeForCores& made) {
  const TensorView z(args.z);
  const int64_t capacity = args.groups.capacity;
  const int64_t two_f = z.columns(), f = two_f / num_halves(args.layout);
  Between b{args.grad_z, args.act, {}, args.grad_z_columnwise, args.act_columnwise};
  const auto take_columns = [&](moire_quantized* copy, DType element, int64_t columns,
                                bool for_cores) {
    if (!is_present(*copy)) *copy = layer.take_copy(element, MOIRE_COLUMNWISE, columns, for_cores);
  };
  if (layer.recipe.is_quantized) {
    const DType gradient = layer.recipe.gradient_dtype;
    if (is_present(args.grad_x)) {
      b.grad_z_rowwise = layer.take_copy(gradient, MOIRE_ROWWISE, two_f, made.grad_z);
    }
    if (is_present(args.grad_w1)) take_columns(&b.grad_z_columnwise, gradient, two_f, made.grad_z);
    if (is_present(args.grad_w2)) take_columns(&b.act_columnwise, DType::kE4M3, f, made.act);
  }
  const bool grad_z_is_copied = is_present(b.grad_z_rowwise) || is_present(b.grad_z_columnwise);
  if (needs.grad_z && !grad_z_is_copied && !b.grad_z.is_present()) {
    b.grad_z = layer.steps.arena.take(z.type(), capacity, two_f);
  }
  const bool act_is_copied = needs.grad_z && is_present(b.act_columnwise);
  if (needs.makes_act && !act_is_copied && !b.act.is_present()) {
    b.act = layer.steps.arena.take(z.type(), capacity, f);
  }
  return b;
}

void run_steps(Steps& steps, const GroupedMlpBackwardArgs& args) {
  LayerSteps layer(steps, args);
  const Recipe& recipe = layer.recipe;
  const MlpBackwardNeeds needs{args};
  const bool needs_w1 = is_present(args.grad_w1), needs_w2 = is_present(args.grad_w2),
             needs_x = is_present(args.grad_x);
  WeightOperand w1, w2;
  if (needs_x) w1 = layer.weight_operand(given_w1(args), false, args.grad_x);
  if (needs.grad_z) {
    const RaggedOperand given = operand_of(args.grad_y_rowwise);
    w2 = layer.weight_operand(given_w2(args), false, grad_act_of(args), given);
  }
  const MadeForCores made = made_for_cores(layer, args, needs, w1, w2);
  const Between between = take_between(layer, args, needs, made);
  // grad_b2, and the gradient of what scales it: where that is probs, added to what FC2's dgrad
  // writes.
  BiasBackwardArgs bias;
  bias.scale = needs.by_probs ? args.probs : args.b2_scale;
  bias.grad_bias = args.grad_b2;
  bias.beta = args.beta_bias;
  if (needs.b2_scale) {
    bias.bias = args.b2;
    bias.grad_scale = needs.by_probs ? args.grad_probs : args.grad_b2_scale;
    bias.beta_scale = needs.by_probs ? 1 : 0;
  }
  const GradY grad_y =
      layer.grad_y_operands(GivenGradY(args), needs.grad_z, needs_w2, made.grad_y, bias);
  RaggedOperand x;
  if (needs_w1) x = layer.wgrad_operand({args.x, args.row_idx}, args.x_columnwise, made.x);
  if (needs.grad_z) {
    steps.run(grouped_gemm_glu_backward, grouped_gemm_glu_backward_workspace,
              fc2_dgrad_args(args, recipe, grad_y.rows, w2, between));
  } else if (needs.makes_act) {
    steps.run(glu, act_args(args, between.act));
  }
  const bool act_is_copied =
      args.act_is_saved != 0 ? is_present(args.act_columnwise) : needs.makes_act && needs.grad_z;
  if (recipe.is_quantized && !act_is_copied) {
    layer.quantize_operand({between.act}, {}, between.act_columnwise, "act");
  }
  layer.run_bias(grad_y, bias);
  if (needs_w2) {
    const RaggedOperand act = layer.operand_between(between.act, between.act_columnwise);
    layer.run_wgrad(grad_y.columns, act, args.grad_w2, args.beta_w2, args.beta_w2_per_group);
  }
  if (needs_x) {
    const RaggedOperand grad_z = layer.operand_between(between.grad_z, between.grad_z_rowwise);
    layer.run_dgrad(grad_z, w1, args.grad_x);
  }
  if (needs_w1) {
    const RaggedOperand grad_z = layer.operand_between(between.grad_z, between.grad_z_columnwise);
    layer.run_wgrad(grad_z, x, args.grad_w1, args.beta_w1, args.beta_w1_per_group);
  }
}

}  // namespace

MOIRE_DEFINE_COMPOSITE(grouped_mlp_backward)

}  // namespace moire
