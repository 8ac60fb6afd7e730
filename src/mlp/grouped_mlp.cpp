// The grouped MLP, forward: FC1 with the activation in its epilogue, then FC2; what a recipe
// quantises before them.
#include <moire/grouped_mlp.h>

#include "mlp/composite.h"
#include "mlp/recipe.h"
#include "mlp/recipe_check.h"

namespace moire {
namespace {

// F; the saved tensors or b1, if any is there, settle a difference of w1 and w2.
int64_t width_of(const GroupedMlpArgs& args, const GivenWeight& w1, const GivenWeight& w2) {
  const int64_t two_f = w1.out_features(), halves = num_halves(args.layout);
  const int64_t first = two_f % halves == 0 ? two_f / halves : w2.in_features();
  const int64_t saved = columns_of({args.z, args.b1}) / halves;
  const TensorView act(args.act);
  return agreed_size(first, act.is_present() ? act.columns() : saved, w2.in_features());
}

void validate(ArgumentCheck& check, const GroupedMlpArgs& args) {
  const TensorView x(args.x), y(args.y), b2(args.b2);
  LayerCheck layer(check, args);
  const auto [capacity, num_groups] = layer.sizes;
  const GivenWeight w1 = given_w1(args), w2 = given_w2(args);
  // Most layers return to where they began, which settles a difference of x and w1.
  const NamedSize h{"H", agreed_size(x.columns(), w1.in_features(), w2.out_features())};
  const int64_t of_b2 = b2.is_present() ? b2.columns() : h.size;
  const NamedSize n{"N", agreed_size(y.columns(), w2.out_features(), of_b2)};
  const NamedSize f{"F", width_of(args, w1, w2)}, two_f = z_columns(args.layout, f.size);
  layer.weight(w2, true, n, f);
  layer.weight(w1, true, two_f, h);
  check.gated(args.activation, args.layout, f.size);
  layer.forward_operand(args, h);
  layer.same_dtype("x", x, "w1", args.w1.tensor);
  layer.same_dtype("x", x, "w2", args.w2.tensor);
  check.optional_tensor("b1", args.b1, kFloatTypes, {num_groups, two_f});
  check.optional_tensor("b2", b2, kFloatTypes, {num_groups, n});
  check.optional_tensor("b2_scale", args.b2_scale, kFP32Only, {capacity});
  check.require(!is_present(args.b2_scale) || (b2.is_present() && args.b2_unscaled == 0),
                "b2_scale is present but b2 is absent or b2_unscaled is 1: it would scale nothing");
  check.optional_tensor("probs", args.probs, kFP32Only, {capacity});
  check.optional_tensor("z", args.z, layer.recipe.types_between(), {capacity, two_f});
  check.optional_tensor("act", args.act, layer.recipe.types_between(), {capacity, f});
  layer.copy("act_columnwise", args.act_columnwise, MOIRE_COLUMNWISE, f);
  check.tensor("y", y, kFloatTypes, {capacity, n});
  layer.same_dtype("y", y, "x", x);
  layer.same_dtype("z", args.z, "y", y);
  layer.same_dtype("act", args.act, "y", y);
}

void run_steps(Steps& steps, const GroupedMlpArgs& args) {
  LayerSteps layer(steps, args);
  const int64_t f = given_w2(args).in_features(), columns = given_w1(args).out_features();
  const TensorView z = is_present(args.z)
                           ? TensorView(args.z)
                           : TensorView(nullptr, DType::kBF16, {args.groups.capacity, columns});
  const RaggedOperand given{args.x, args.row_idx, args.x_scales};
  const WeightOperand w1 = layer.weight_operand(given_w1(args), true, z, given);
  const WeightOperand w2 = layer.weight_operand(given_w2(args), true, args.y);
  const RaggedOperand x = layer.forward_operand(given, args.x_columnwise, w1, z);
  auto fc1 = layer.product_of<GroupedGemmGluArgs>(x, w1);
  share_activation(fc1, args);
  fc1.bias = args.b1;
  fc1.act = args.act;
  fc1.act_columnwise = args.act_columnwise;
  fc1.fractional_scales = layer.recipe.ragged_scales;
  fc1.storage = static_cast<int32_t>(layer.recipe.between(TensorView(args.y).type()));
  fc1.tail = MOIRE_TAIL_UNTOUCHED;
  if (layer.recipe.is_quantized) {
    fc1.act_rowwise =
        layer.take_copy(DType::kE4M3, MOIRE_ROWWISE, f, layer.cores_multiply(w2, true, args.y));
  } else if (!is_present(args.act)) {
    fc1.act = steps.arena.take(x.tensor.type(), args.groups.capacity, f);
  }
  steps.run(grouped_gemm_glu, grouped_gemm_glu_workspace, fc1);
  layer.run_forward(layer.operand_between(fc1.act, fc1.act_rowwise), w2, args.b2,
                    fields::probs_scale_b2(args) ? args.probs : args.b2_scale, args.y);
}

}  // namespace

MOIRE_DEFINE_COMPOSITE(grouped_mlp)

}  // namespace moire
