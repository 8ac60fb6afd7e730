// grouped_gemm: validation and dispatch.
#include <moire/grouped_gemm.h>

#include "ops/dispatch.h"
#include "ops/grouped_gemm_check.h"

namespace moire {
namespace {

using Purpose = ArgumentCheck::Purpose;

Status validate(const Context& context, const GroupedGemmArgs& args, Purpose purpose) {
  ArgumentCheck check("grouped_gemm", context, purpose);
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
  check.require(args.bias_scale.rank == 0 || args.bias.rank != 0,
                "bias_scale is present but bias is absent");
  check.optional_tensor("bias_scale", args.bias_scale, kFP32Only, {capacity});
  check.tensor("d", d, kFloatTypes, {capacity, n});
  return check.status();
}

Cost cost_of(const GroupedGemmArgs& args) {
  return {problem_text(args.groups, args.a, args.b.tensor),
          bytes_read(args.a, args.row_idx, args.groups) + bytes_of(args.b.tensor) +
              bytes_of(args.bias) + bytes_of(args.bias_scale) + bytes_of(args.a_scales) +
              bytes_of(args.b_scales)};
}

}  // namespace

Status grouped_gemm(const Context& context, const GroupedGemmArgs& args) {
  MOIRE_RETURN_IF_ERROR(validate(context, args, Purpose::kRun));
  return dispatch(context, "grouped_gemm", args, [&] { return cost_of(args); });
}

Status grouped_gemm_workspace(const Context& context, const GroupedGemmArgs& args, size_t* bytes) {
  MOIRE_RETURN_IF_ERROR(validate(context, args, Purpose::kSizeWorkspace));
  return size_workspace(context, "grouped_gemm", args, bytes);
}

}  // namespace moire
