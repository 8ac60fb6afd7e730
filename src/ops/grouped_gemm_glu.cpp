// grouped_gemm_glu: validation and dispatch.
#include <moire/grouped_gemm.h>

#include "ops/dispatch.h"
#include "ops/grouped_gemm_check.h"

namespace moire {
namespace {

// act is wanted as it is, quantised, or both.
void check_outputs(ArgumentCheck& check, const GroupedGemmGluArgs& args, int64_t f) {
  const TensorView z(args.z), act(args.act);
  const Groups groups(args.groups);
  const NamedSize capacity{"capacity", groups.capacity}, columns{"F", f};
  const QuantizedCopies copies{"act_rowwise", args.act_rowwise, "act_columnwise",
                               args.act_columnwise};
  if (act.is_present() || !copies.any()) {
    check.tensor("act", act, kFloatTypes, {capacity, columns});
  }
  check.optional_tensor("z", z, kFloatTypes, {capacity, {"2F", 2 * f}});
  check.same_dtype("z", z, "act", act);
  check_quantized_copies(check, copies, args.fractional_scales, groups, columns);
  check.require(act.is_present() || z.is_present() || (args.storage >= 0 && args.storage <= 3),
                "storage is ", static_cast<DType>(args.storage),
                ", must be fp32, bf16, fp16 or 0 (bf16)");
}

void validate(ArgumentCheck& check, const GroupedGemmGluArgs& args) {
  const TensorView a(args.a);
  const Weight b(args.b);
  const Groups groups(args.groups);
  const int64_t f = b.out_features() / 2;
  const NamedSize num_groups{"G", groups.num_groups}, capacity{"capacity", groups.capacity};
  const NamedSize two_f{"2F", 2 * f}, k{"k", b.in_features()};
  check.enumerator("tail", args.tail, 2);
  check.groups(groups);
  check.require(b.tensor.rank != 3 || b.out_features() % 2 == 0, "b has ", b.out_features(),
                " out features, must be even: a gate and an up for each column");
  const ScaledTensor scaled_a{{"a", a}, {"a_scales", args.a_scales}};
  const ScaledTensor scaled_b{{"b", b.tensor}, {"b_scales", args.b_scales}};
  check.weight("b", b, kOperandTypes, num_groups, two_f, k);
  check.gated(args.activation, args.layout, f);
  check_operand(check, scaled_a, args.row_idx, groups, "b", k.size);
  check_weight_scales(check, b, scaled_b,
                      b.layout == MOIRE_OUT_IN ? MOIRE_ROWWISE : MOIRE_COLUMNWISE);
  check_accumulation(check, args.accumulation, scaled_a.data, scaled_b.data);
  check.optional_tensor("bias", args.bias, kFloatTypes, {num_groups, two_f});
  check.optional_tensor("probs", args.probs, kFP32Only, {capacity});
  check_outputs(check, args, f);
}

std::string problem_of(const GroupedGemmGluArgs& args) {
  return problem_text(args.groups, args.a, args.b.tensor);
}

}  // namespace

MOIRE_DEFINE_OP_WITH_WORKSPACE(grouped_gemm_glu)

}  // namespace moire
