// grouped_gemm_glu_backward: validation and dispatch.
#include <moire/grouped_gemm.h>

#include "core/sizes.h"
#include "ops/dispatch.h"
#include "ops/grouped_gemm_check.h"

namespace moire {
namespace {

// grad_z is wanted as it is, quantised, or both.
void check_outputs(ArgumentCheck& check, const GroupedGemmGluBackwardArgs& args, int64_t f) {
  const Groups groups(args.groups);
  const TensorView z(args.z), grad_z(args.grad_z), act(args.act);
  const NamedSize num_groups{"G", groups.num_groups}, capacity{"capacity", groups.capacity};
  const NamedSize two_f{"2F", 2 * f};
  const QuantizedCopies copies{"grad_z_rowwise", args.grad_z_rowwise, "grad_z_columnwise",
                               args.grad_z_columnwise};
  if (grad_z.is_present() || !copies.any()) {
    check.tensor("grad_z", grad_z, kFloatTypes, {capacity, two_f});
  }
  check.same_dtype("grad_z", grad_z, "z", z);
  check.optional_tensor("act", act, kFloatTypes, {capacity, {"F", f}});
  check.same_dtype("act", act, "z", z);
  check.optional_tensor("grad_probs", args.grad_probs, kFP32Only, {capacity});
  check.optional_tensor("grad_bias", args.grad_bias, kFloatTypes, {num_groups, two_f});
  check_quantized_copies(check, copies, args.fractional_scales, groups, two_f);
  check_quantized_copies(check, {"act_rowwise", {}, "act_columnwise", args.act_columnwise},
                         args.fractional_scales, groups, {"F", f});
}

void validate(ArgumentCheck& check, const GroupedGemmGluBackwardArgs& args) {
  const Weight w2(args.w2);
  const Groups groups(args.groups);
  const NamedSize num_groups{"G", groups.num_groups}, capacity{"capacity", groups.capacity};
  const NamedSize k{"k", w2.out_features()}, f{"F", w2.in_features()};
  check.enumerator("tail", args.tail, 2);
  check.enumerator("beta", args.beta, 2);
  check.groups(groups);
  const ScaledTensor grad_y{{"grad_y", args.grad_y}, {"grad_y_scales", args.grad_y_scales}};
  const ScaledTensor scaled_w2{{"w2", w2.tensor}, {"w2_scales", args.w2_scales}};
  check.weight("w2", w2, kOperandTypes, num_groups, k, f);
  check.gated(args.activation, args.layout, f.size);
  check_operand(check, grad_y, args.row_idx, groups, "w2", k.size);
  check_weight_scales(check, w2, scaled_w2,
                      w2.layout == MOIRE_IN_OUT ? MOIRE_ROWWISE : MOIRE_COLUMNWISE);
  check_accumulation(check, args.accumulation, grad_y.data, scaled_w2.data);
  check.tensor("z", args.z, kFloatTypes, {capacity, {"2F", product(2, f.size)}});
  check.optional_tensor("probs", args.probs, kFP32Only, {capacity});
  if (check.ok()) check_outputs(check, args, f.size);
}

std::string problem_of(const GroupedGemmGluBackwardArgs& args) {
  return problem_text(args.groups, args.grad_y, args.w2.tensor);
}

}  // namespace

MOIRE_DEFINE_OP_WITH_WORKSPACE(grouped_gemm_glu_backward)

}  // namespace moire
