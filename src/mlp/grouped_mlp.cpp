// The grouped MLP, forward: FC1 with the activation in its epilogue, then FC2; what a recipe
// quantises before them.
#include <moire/grouped_mlp.h>

#include <optional>

#include "core/argument_check.h"
#include "core/sizes.h"
#include "core/status_macros.h"
#include "mlp/recipe.h"
#include "mlp/recipe_check.h"
#include "mlp/validate.h"

namespace moire {
namespace {

// F as the saved tensors or b1 have it, to settle a difference of w1 and w2; 0 if none is there.
int64_t width_beside_weights(const GroupedMlpArgs& args) {
  if (is_present(args.act)) return TensorView(args.act).columns();
  return columns_of({args.z, args.b1}) / 2;
}

int64_t width_of(const GroupedMlpArgs& args, const QuantizableWeight& w1,
                 const QuantizableWeight& w2) {
  const int64_t two_f = w1.out_features();
  const int64_t first = two_f % 2 == 0 ? two_f / 2 : w2.in_features();
  return agreed_size(first, width_beside_weights(args), w2.in_features());
}

void validate(ArgumentCheck& check, const GroupedMlpArgs& args) {
  const Groups groups(args.groups);
  const TensorView x(args.x);
  if (!check_recipe(check, args)) return;
  const Recipe recipe(args);
  const QuantizableWeight w1{"w1", args.w1, "w1_quantized", args.w1_quantized};
  const QuantizableWeight w2{"w2", args.w2, "w2_quantized", args.w2_quantized};
  const NamedSize capacity{"capacity", groups.capacity}, num_groups{"G", groups.num_groups};
  const NamedSize h{"H", agreed_size(x.columns(), w1.in_features(), w2.out_features())};
  const NamedSize f{"F", width_of(args, w1, w2)}, two_f{"2F", product(2, f.size)};
  check.enumerator("tail", args.tail, 2);
  check.groups(groups);
  check_weight(check, recipe, w2, true, num_groups, h, f);
  check_weight(check, recipe, w1, true, num_groups, two_f, h);
  check.gated(args.activation, args.layout, f.size);
  check_forward_operand(check, recipe, args, groups, h);
  if (!recipe.is_quantized) {
    check.same_dtype("x", x, "w1", args.w1.tensor);
    check.same_dtype("x", x, "w2", args.w2.tensor);
  }
  check.optional_tensor("b1", args.b1, kFloatTypes, {num_groups, two_f});
  check.optional_tensor("b2", args.b2, kFloatTypes, {num_groups, h});
  check.optional_tensor("probs", args.probs, kFP32Only, {capacity});
  check.optional_tensor("z", args.z, recipe.types_between(), {capacity, two_f});
  check.optional_tensor("act", args.act, recipe.types_between(), {capacity, f});
  check_copy(check, recipe, "act_columnwise", args.act_columnwise, MOIRE_COLUMNWISE, groups,
             f.size);
  check.tensor("y", args.y, kFloatTypes, {capacity, h});
  if (!recipe.is_quantized) {
    check.same_dtype("y", args.y, "x", x);
    check.same_dtype("z", args.z, "y", args.y);
    check.same_dtype("act", args.act, "y", args.y);
  }
}

struct MlpSteps {
  std::optional<QuantizeWeightArgs> quantize_w1, quantize_w2;
  std::optional<QuantizeArgs> quantize_x;
  GroupedGemmGluArgs fc1;
  GroupedGemmArgs fc2;

  template <class Runner>
  Status run(Runner& run) {
    if (quantize_w1) MOIRE_RETURN_IF_ERROR(run(quantize_weight, *quantize_w1, "w1"));
    if (quantize_w2) MOIRE_RETURN_IF_ERROR(run(quantize_weight, *quantize_w2, "w2"));
    if (quantize_x) MOIRE_RETURN_IF_ERROR(run(quantize, *quantize_x, "x"));
    MOIRE_RETURN_IF_ERROR(run(grouped_gemm_glu, grouped_gemm_glu_workspace, fc1));
    return run(grouped_gemm, grouped_gemm_workspace, fc2);
  }
};

GroupedGemmGluArgs fc1_args(const GroupedMlpArgs& args, const Recipe& recipe,
                            const RaggedOperand& x, const WeightOperand& w1) {
  GroupedGemmGluArgs fc1;
  fc1.a = x.tensor;
  fc1.row_idx = x.row_idx;
  fc1.a_scales = x.scales;
  fc1.b = w1.weight;
  fc1.b_scales = w1.scales;
  fc1.accumulation = recipe.accumulation;
  fc1.bias = args.b1;
  fc1.probs = args.probs;
  fc1.z = args.z;
  fc1.act = args.act;
  fc1.act_columnwise = args.act_columnwise;
  fc1.fractional_scales = recipe.fractional_scales;
  fc1.storage = static_cast<int32_t>(recipe.between(TensorView(args.y).type()));
  fc1.groups = args.groups;
  fc1.activation = args.activation;
  fc1.layout = args.layout;
  fc1.tail = MOIRE_TAIL_UNTOUCHED;
  return fc1;
}

GroupedGemmArgs fc2_args(const GroupedMlpArgs& args, const Recipe& recipe, const RaggedOperand& act,
                         const WeightOperand& w2) {
  GroupedGemmArgs fc2;
  fc2.a = act.tensor;
  fc2.a_scales = act.scales;
  fc2.b = w2.weight;
  fc2.b_scales = w2.scales;
  fc2.accumulation = recipe.accumulation;
  fc2.bias = args.b2;
  fc2.bias_scale = is_present(args.b2) ? args.probs : moire_tensor{};
  fc2.d = args.y;
  fc2.groups = args.groups;
  fc2.tail = args.tail;
  return fc2;
}

MlpSteps steps_of(const Context&, const GroupedMlpArgs& args, Arena& arena) {
  const Recipe recipe(args);
  const int64_t capacity = args.groups.capacity;
  MlpSteps steps;
  const WeightOperand w1 =
      weight_operand(recipe, args.w1, args.w1_quantized, true, arena, steps.quantize_w1);
  const WeightOperand w2 =
      weight_operand(recipe, args.w2, args.w2_quantized, true, arena, steps.quantize_w2);
  const RaggedOperand x = forward_operand(recipe, {args.x, args.row_idx, args.x_scales},
                                          args.groups, args.x_columnwise, arena, steps.quantize_x);
  const int64_t f = w2.weight.in_features();
  steps.fc1 = fc1_args(args, recipe, x, w1);
  RaggedOperand act{args.act, {}, {}};
  if (recipe.is_quantized) {
    steps.fc1.act_rowwise =
        take_copy(arena, recipe, DType::kE4M3, MOIRE_ROWWISE, capacity, f, args.groups.num_groups);
    act = operand_of(steps.fc1.act_rowwise);
  } else if (!is_present(args.act)) {
    act.tensor = arena.take(x.tensor.type(), capacity, f);
    steps.fc1.act = act.tensor;
  }
  steps.fc2 = fc2_args(args, recipe, act, w2);
  return steps;
}

}  // namespace

MOIRE_DEFINE_COMPOSITE(grouped_mlp, MlpSteps)

}  // namespace moire
