// grouped_gemm: validation and dispatch.
#include <moire/grouped_gemm.h>

#include "ops/dispatch.h"
#include "ops/grouped_gemm_check.h"

namespace moire {
namespace {

void validate(ArgumentCheck& check, const GroupedGemmArgs& args) {
  const TensorView a(args.a), d(args.d);
  const Weight b(args.b);
  const Groups groups(args.groups);
  const NamedSize num_groups{"G", groups.num_groups}, capacity{"capacity", groups.capacity};
  const NamedSize out{"out", b.out_features()}, in{"in", b.in_features()};
  const bool transposed = args.transpose_b != 0;
  const NamedSize n{"n", transposed ? in.size : out.size};
  check.enumerator("transpose_b", args.transpose_b, 2);
  check.enumerator("tail", args.tail, 2);
  check.groups(groups);
  const ScaledTensor scaled_a{{"a", a}, {"a_scales", args.a_scales}};
  const ScaledTensor scaled_b{{"b", b.tensor}, {"b_scales", args.b_scales}};
  check.weight("b", b, kOperandTypes, num_groups, out, in);
  check_operand(check, scaled_a, args.row_idx, groups, "b", transposed ? out.size : in.size);
  const bool k_is_last = (b.layout == MOIRE_OUT_IN) != transposed;
  check_weight_scales(check, b, scaled_b, k_is_last ? MOIRE_ROWWISE : MOIRE_COLUMNWISE);
  check_accumulation(check, args.accumulation, scaled_a.data, scaled_b.data);
  check.optional_tensor("bias", args.bias, kFloatTypes, {num_groups, n});
  check.require(!is_present(args.bias_scale) || is_present(args.bias),
                "bias_scale is present but bias is absent");
  check.optional_tensor("bias_scale", args.bias_scale, kFP32Only, {capacity});
  check.tensor("d", d, kFloatTypes, {capacity, n});
}

std::string problem_of(const GroupedGemmArgs& args) {
  return problem_text(args.groups, args.a, args.b.tensor);
}

}  // namespace

MOIRE_DEFINE_OP_WITH_WORKSPACE(grouped_gemm)

}  // namespace moire
