// Every argument of grouped_mlp_backward.
#include "mlp/grouped_mlp_backward.h"
#include "mlp/recipe_check.h"
#include "mlp/validate.h"

namespace moire {
namespace {

void check_gradients(ArgumentCheck& check, const GroupedMlpBackwardArgs& args, NamedSize h,
                     NamedSize f) {
  const NamedSize two_f{"2F", 2 * f.size}, capacity{"capacity", args.groups.capacity},
      num_groups{"G", args.groups.num_groups};
  check.optional_tensor("grad_x", args.grad_x, kFloatTypes, {capacity, h});
  check.optional_tensor("grad_z", args.grad_z, kFloatTypes, {capacity, two_f});
  check.same_dtype("grad_z", args.grad_z, "z", args.z);
  if (is_present(args.grad_w1)) {
    check.weight("grad_w1", args.grad_w1, kFloatTypes, num_groups, two_f, h);
  }
  if (is_present(args.grad_w2)) {
    check.weight("grad_w2", args.grad_w2, kFloatTypes, num_groups, h, f);
  }
  check.optional_tensor("grad_b1", args.grad_b1, kFloatTypes, {num_groups, two_f});
  check.optional_tensor("grad_b2", args.grad_b2, kFloatTypes, {num_groups, h});
  check.optional_tensor("grad_probs", args.grad_probs, kFP32Only, {capacity});
  check.enumerator("beta_bias", args.beta_bias, 2);
  check.enumerator("act_is_saved", args.act_is_saved, 2);
}

}  // namespace

void validate(ArgumentCheck& check, const GroupedMlpBackwardArgs& args) {
  const Groups groups(args.groups);
  const TensorView z(args.z), grad_y(args.grad_y);
  if (!check_recipe(check, args)) return;
  const Recipe recipe(args);
  const MlpBackwardNeeds needs(args);
  const GivenWeight w1{"w1", args.w1, args.w1_quantized, args.w1_prepared};
  const GivenWeight w2{"w2", args.w2, args.w2_quantized, args.w2_prepared};
  const NamedSize capacity{"capacity", groups.capacity}, num_groups{"G", groups.num_groups};
  const NamedSize f{"F", z.columns() / 2}, two_f{"2F", 2 * f.size};
  const NamedSize h{"H",
                    columns_of({grad_y, args.grad_y_rowwise.data, args.grad_y_columnwise.data})};
  check.enumerator("tail", args.tail, 2);
  check.groups(groups);
  check.tensor("z", z, recipe.types_between(), {capacity, two_f});
  check.gated(args.activation, args.layout, f.size);
  check_grad_y(check, recipe, args, groups, h, needs.grad_z, is_present(args.grad_w2), needs.b2);
  check.optional_tensor("probs", args.probs, kFP32Only, {capacity});
  if (needs.grad_z) check_weight(check, recipe, w2, false, num_groups, h, f);
  if (is_present(args.grad_x)) check_weight(check, recipe, w1, false, num_groups, two_f, h);
  check_copy(check, recipe, "x_columnwise", args.x_columnwise, MOIRE_COLUMNWISE, groups, h.size);
  if (is_present(args.grad_w1) && !is_present(args.x_columnwise)) {
    check.ragged("x", args.x, "row_idx", args.row_idx, groups, h);
  }
  if (!recipe.is_quantized) {
    check.same_dtype("grad_y", grad_y, "z", z);
    if (needs.grad_z) check.same_dtype("w2", args.w2.tensor, "grad_y", grad_y);
    if (is_present(args.grad_x)) check.same_dtype("w1", args.w1.tensor, "grad_y", grad_y);
    if (is_present(args.grad_w1)) check.same_dtype("x", args.x, "grad_y", grad_y);
  }
  check.require(args.act_is_saved == 0 || is_present(args.act) || is_present(args.act_columnwise),
                "act_is_saved is 1 but act is absent");
  check.optional_tensor("act", args.act, kFloatTypes, {capacity, f});
  check.same_dtype("act", args.act, "z", z);
  check_copy(check, recipe, "act_columnwise", args.act_columnwise, MOIRE_COLUMNWISE, groups,
             f.size);
  check_copy(check, recipe, "grad_z_columnwise", args.grad_z_columnwise, MOIRE_COLUMNWISE, groups,
             two_f.size);
  if (needs.scale_from_b2) check.tensor("b2", args.b2, kFloatTypes, {num_groups, h});
  check_gradients(check, args, h, f);
  check.beta("beta_w1", args.beta_w1, args.beta_w1_per_group, groups);
  check.beta("beta_w2", args.beta_w2, args.beta_w2_per_group, groups);
}

}  // namespace moire
