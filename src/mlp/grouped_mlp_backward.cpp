// The grouped MLP, backward. From grad_y: FC2 dgrad with the activation's backward in its epilogue
// (grad_z, grad_probs, grad_b1, act again), FC1 dgrad, and the two weight gradients; only the steps
// whose outputs are asked for.
#include "mlp/grouped_mlp_backward.h"

#include <moire/grouped_mlp.h>

#include <optional>

#include "core/status_macros.h"
#include "mlp/validate.h"

namespace moire {
namespace {

struct MlpBackwardSteps {
  std::optional<QuantizeWeightArgs> quantize_w1, quantize_w2;
  std::optional<QuantizeArgs> quantize_grad_y, quantize_x;
  std::optional<PermuteArgs> gather_grad_y;
  std::optional<GroupedGemmGluBackwardArgs> fc2_dgrad;
  std::optional<GluArgs> act;  // where no FC2 dgrad re-emits it
  std::optional<QuantizeArgs> quantize_act;
  std::optional<BiasBackwardArgs> b2;
  std::optional<GroupedGemmWgradArgs> fc2_wgrad;
  std::optional<GroupedGemmArgs> fc1_dgrad;
  std::optional<GroupedGemmWgradArgs> fc1_wgrad;

  template <class Runner>
  Status run(Runner& run) {
    if (quantize_w1) MOIRE_RETURN_IF_ERROR(run(quantize_weight, *quantize_w1, "w1"));
    if (quantize_w2) MOIRE_RETURN_IF_ERROR(run(quantize_weight, *quantize_w2, "w2"));
    if (quantize_grad_y) MOIRE_RETURN_IF_ERROR(run(quantize, *quantize_grad_y, "grad_y"));
    if (quantize_x) MOIRE_RETURN_IF_ERROR(run(quantize, *quantize_x, "x"));
    if (gather_grad_y) MOIRE_RETURN_IF_ERROR(run(permute, *gather_grad_y));
    if (fc2_dgrad) {
      MOIRE_RETURN_IF_ERROR(
          run(grouped_gemm_glu_backward, grouped_gemm_glu_backward_workspace, *fc2_dgrad));
    }
    if (act) MOIRE_RETURN_IF_ERROR(run(glu, *act));
    if (quantize_act) MOIRE_RETURN_IF_ERROR(run(quantize, *quantize_act, "act"));
    if (b2) MOIRE_RETURN_IF_ERROR(run(bias_backward, bias_backward_workspace, *b2));
    if (fc2_wgrad) {
      MOIRE_RETURN_IF_ERROR(run(grouped_gemm_wgrad, grouped_gemm_wgrad_workspace, *fc2_wgrad));
    }
    if (fc1_dgrad) MOIRE_RETURN_IF_ERROR(run(grouped_gemm, grouped_gemm_workspace, *fc1_dgrad));
    if (fc1_wgrad) {
      MOIRE_RETURN_IF_ERROR(run(grouped_gemm_wgrad, grouped_gemm_wgrad_workspace, *fc1_wgrad));
    }
    return {};
  }
};

// What lies between the products: as stored, or as the copies that the next ones read.
struct Between {
  TensorView grad_z, act;
  moire_quantized grad_z_rowwise = {}, grad_z_columnwise = {}, act_columnwise = {};
};

// What the products read.
struct Operands {
  RaggedOperand dgrad_grad_y, wgrad_grad_y;
  RaggedOperand dgrad_grad_z, wgrad_grad_z;
  RaggedOperand x, act;
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

// The operands in 8 bits, and the steps that make what neither the caller nor a product gives.
Operands quantized_operands(const GroupedMlpBackwardArgs& args, const Recipe& recipe,
                            const MlpBackwardNeeds& needs, const RaggedOperand& grad_y,
                            const Between& between, Arena& arena, MlpBackwardSteps& steps) {
  const bool needs_w1 = is_present(args.grad_w1), needs_w2 = is_present(args.grad_w2);
  moire_quantized rowwise = args.grad_y_rowwise, columnwise = args.grad_y_columnwise;
  make_copies(recipe, recipe.gradient_dtype, grad_y, args.groups, needs.grad_z ? &rowwise : nullptr,
              needs_w2 ? &columnwise : nullptr, arena, steps.quantize_grad_y);
  moire_quantized x = args.x_columnwise;
  make_copies(recipe, DType::kE4M3, {args.x, args.row_idx, {}}, args.groups, nullptr,
              needs_w1 ? &x : nullptr, arena, steps.quantize_x);
  const bool act_is_given = args.act_is_saved != 0 && is_present(args.act_columnwise);
  const bool act_is_emitted = needs.makes_act && needs.grad_z;
  if (!act_is_given && !act_is_emitted) {
    steps.quantize_act =
        quantize_step(recipe, {between.act, {}, {}}, args.groups, {}, between.act_columnwise);
  }
  return {operand_of(rowwise),
          operand_of(columnwise),
          operand_of(between.grad_z_rowwise),
          operand_of(between.grad_z_columnwise),
          operand_of(x),
          operand_of(between.act_columnwise)};
}

MlpBackwardSteps steps_of(const Context& context, const GroupedMlpBackwardArgs& args,
                          Arena& arena) {
  const Recipe recipe(args);
  const MlpBackwardNeeds needs(args);
  const Between between = take_between(args, recipe, needs, arena);
  MlpBackwardSteps steps;
  RaggedOperand grad_y{args.grad_y, args.gathered_grad_y != 0 ? args.row_idx : moire_tensor{}, {}};
  if (!recipe.is_quantized && needs.grad_z && is_present(args.grad_w2)) {
    grad_y = gathered_once(context, grad_y, args.groups, arena, steps.gather_grad_y);
  }
  const RaggedOperand grad_z{between.grad_z, {}, {}};
  const Operands operands =
      recipe.is_quantized
          ? quantized_operands(args, recipe, needs, grad_y, between, arena, steps)
          : Operands{
                grad_y, grad_y, grad_z, grad_z, {args.x, args.row_idx, {}}, {between.act, {}, {}}};
  if (needs.grad_z) {
    const WeightOperand w2 =
        weight_operand(recipe, args.w2, args.w2_quantized, false, arena, steps.quantize_w2);
    steps.fc2_dgrad = fc2_dgrad_args(args, recipe, operands.dgrad_grad_y, w2, between);
  } else if (needs.makes_act) {
    steps.act = act_args(args, between.act);
  }
  if (needs.b2) steps.b2 = b2_args(args, grad_y, needs.scale_from_b2);
  if (is_present(args.grad_w2)) {
    steps.fc2_wgrad = wgrad_args(operands.wgrad_grad_y, operands.act, args.grad_w2, args.beta_w2,
                                 args.beta_w2_per_group, args.groups, recipe.accumulation);
  }
  if (is_present(args.grad_x)) {
    const WeightOperand w1 =
        weight_operand(recipe, args.w1, args.w1_quantized, false, arena, steps.quantize_w1);
    steps.fc1_dgrad = dgrad_args(operands.dgrad_grad_z, w1, args.grad_x, args.groups, args.tail,
                                 recipe.accumulation);
  }
  if (is_present(args.grad_w1)) {
    steps.fc1_wgrad = wgrad_args(operands.wgrad_grad_z, operands.x, args.grad_w1, args.beta_w1,
                                 args.beta_w1_per_group, args.groups, recipe.accumulation);
  }
  return steps;
}

}  // namespace

MOIRE_DEFINE_COMPOSITE(grouped_mlp_backward, MlpBackwardSteps)

}  // namespace moire
