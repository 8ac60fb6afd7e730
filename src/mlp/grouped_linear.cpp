// The grouped linear layer: y = x W^T (+ scale * bias), and its gradients; each is one op, after
// what a recipe quantises.
#include <moire/grouped_mlp.h>

#include <optional>

#include "core/argument_check.h"
#include "core/status_macros.h"
#include "mlp/recipe.h"
#include "mlp/recipe_check.h"
#include "mlp/steps.h"
#include "mlp/validate.h"

namespace moire {
namespace {

void validate(ArgumentCheck& check, const GroupedLinearArgs& args) {
  const Groups groups(args.groups);
  if (!check_recipe(check, args)) return;
  const Recipe recipe(args);
  const QuantizableWeight w{"w", args.w, "w_quantized", args.w_quantized};
  const NamedSize capacity{"capacity", groups.capacity}, num_groups{"G", groups.num_groups};
  const NamedSize in{"in", w.in_features()}, out{"out", w.out_features()};
  check.enumerator("tail", args.tail, 2);
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

struct LinearSteps {
  std::optional<QuantizeWeightArgs> quantize_w;
  std::optional<QuantizeArgs> quantize_x;
  GroupedGemmArgs gemm;

  template <class Runner>
  Status run(Runner& run) {
    if (quantize_w) MOIRE_RETURN_IF_ERROR(run(quantize_weight, *quantize_w, "w"));
    if (quantize_x) MOIRE_RETURN_IF_ERROR(run(quantize, *quantize_x, "x"));
    return run(grouped_gemm, grouped_gemm_workspace, gemm);
  }
};

LinearSteps steps_of(const Context&, const GroupedLinearArgs& args, Arena& arena) {
  const Recipe recipe(args);
  LinearSteps steps;
  const WeightOperand w =
      weight_operand(recipe, args.w, args.w_quantized, true, arena, steps.quantize_w);
  const RaggedOperand x = forward_operand(recipe, {args.x, args.row_idx, args.x_scales},
                                          args.groups, args.x_columnwise, arena, steps.quantize_x);
  GroupedGemmArgs& gemm = steps.gemm;
  gemm.a = x.tensor;
  gemm.row_idx = x.row_idx;
  gemm.a_scales = x.scales;
  gemm.b = w.weight;
  gemm.b_scales = w.scales;
  gemm.accumulation = recipe.accumulation;
  gemm.bias = args.bias;
  gemm.bias_scale = args.scale;
  gemm.d = args.y;
  gemm.groups = args.groups;
  gemm.tail = args.tail;
  return steps;
}

void validate(ArgumentCheck& check, const GroupedLinearBackwardArgs& args) {
  const Groups groups(args.groups);
  const TensorView grad_y(args.grad_y), grad_x(args.grad_x), grad_bias(args.grad_bias),
      grad_scale(args.grad_scale);
  const Weight grad_w(args.grad_w);
  if (!check_recipe(check, args)) return;
  const Recipe recipe(args);
  const QuantizableWeight w{"w", args.w, "w_quantized", args.w_quantized};
  const NamedSize capacity{"capacity", groups.capacity}, num_groups{"G", groups.num_groups};
  const NamedSize out{"out",
                      columns_of({grad_y, args.grad_y_rowwise.data, args.grad_y_columnwise.data})};
  check.enumerator("tail", args.tail, 2);
  check.groups(groups);
  check_grad_y(check, recipe, args, groups, out, grad_x.is_present(), grad_w.is_present(),
               grad_bias.is_present() || grad_scale.is_present());
  const int64_t in_of_x = columns_of({args.x, args.x_columnwise.data, args.grad_x});
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
  check.beta("beta", args.beta, args.beta_per_group, groups);
}

struct LinearBackwardSteps {
  std::optional<QuantizeWeightArgs> quantize_w;
  std::optional<QuantizeArgs> quantize_grad_y, quantize_x;
  std::optional<PermuteArgs> gather_grad_y;
  std::optional<BiasBackwardArgs> bias;
  std::optional<GroupedGemmArgs> grad_x;
  std::optional<GroupedGemmWgradArgs> grad_w;

  template <class Runner>
  Status run(Runner& run) {
    if (quantize_w) MOIRE_RETURN_IF_ERROR(run(quantize_weight, *quantize_w, "w"));
    if (quantize_grad_y) MOIRE_RETURN_IF_ERROR(run(quantize, *quantize_grad_y, "grad_y"));
    if (quantize_x) MOIRE_RETURN_IF_ERROR(run(quantize, *quantize_x, "x"));
    if (gather_grad_y) MOIRE_RETURN_IF_ERROR(run(permute, *gather_grad_y));
    if (bias) MOIRE_RETURN_IF_ERROR(run(bias_backward, bias_backward_workspace, *bias));
    if (grad_x) MOIRE_RETURN_IF_ERROR(run(grouped_gemm, grouped_gemm_workspace, *grad_x));
    if (grad_w)
      MOIRE_RETURN_IF_ERROR(run(grouped_gemm_wgrad, grouped_gemm_wgrad_workspace, *grad_w));
    return {};
  }
};

BiasBackwardArgs bias_args(const GroupedLinearBackwardArgs& args, const RaggedOperand& grad_y) {
  BiasBackwardArgs bias;
  bias.grad_y = grad_y.tensor;
  bias.row_idx = grad_y.row_idx;
  bias.scale = args.scale;
  bias.bias = is_present(args.grad_scale) ? args.bias : moire_tensor{};
  bias.grad_bias = args.grad_bias;
  bias.grad_scale = args.grad_scale;
  bias.beta = args.beta;
  bias.beta_per_group = args.beta_per_group;
  bias.groups = args.groups;
  bias.tail = args.tail;
  return bias;
}

LinearBackwardSteps steps_of(const Context& context, const GroupedLinearBackwardArgs& args,
                             Arena& arena) {
  const Recipe recipe(args);
  const bool needs_x = is_present(args.grad_x), needs_w = is_present(args.grad_w);
  LinearBackwardSteps steps;
  RaggedOperand x{args.x, args.row_idx, {}};
  RaggedOperand grad_y{args.grad_y, args.gathered_grad_y != 0 ? args.row_idx : moire_tensor{}, {}};
  if (!recipe.is_quantized && needs_x && needs_w) {
    grad_y = gathered_once(context, grad_y, args.groups, arena, steps.gather_grad_y);
  }
  RaggedOperand rows = grad_y, columns = grad_y;
  if (recipe.is_quantized) {
    moire_quantized rowwise = args.grad_y_rowwise, columnwise = args.grad_y_columnwise;
    make_copies(recipe, recipe.gradient_dtype, grad_y, args.groups, needs_x ? &rowwise : nullptr,
                needs_w ? &columnwise : nullptr, arena, steps.quantize_grad_y);
    rows = operand_of(rowwise);
    columns = operand_of(columnwise);
    moire_quantized x_columnwise = args.x_columnwise;
    make_copies(recipe, DType::kE4M3, x, args.groups, nullptr, needs_w ? &x_columnwise : nullptr,
                arena, steps.quantize_x);
    x = operand_of(x_columnwise);
  }
  if (is_present(args.grad_bias) || is_present(args.grad_scale)) {
    steps.bias = bias_args(args, grad_y);
  }
  if (needs_x) {
    const WeightOperand w =
        weight_operand(recipe, args.w, args.w_quantized, false, arena, steps.quantize_w);
    steps.grad_x = dgrad_args(rows, w, args.grad_x, args.groups, args.tail, recipe.accumulation);
  }
  if (needs_w) {
    steps.grad_w = wgrad_args(columns, x, args.grad_w, args.beta, args.beta_per_group, args.groups,
                              recipe.accumulation);
  }
  return steps;
}

}  // namespace

MOIRE_DEFINE_COMPOSITE(grouped_linear, LinearSteps)
MOIRE_DEFINE_COMPOSITE(grouped_linear_backward, LinearBackwardSteps)

}  // namespace moire
