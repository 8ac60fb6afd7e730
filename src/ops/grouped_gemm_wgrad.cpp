// grouped_gemm_wgrad: validation and dispatch.
#include <moire/grouped_gemm.h>

#include "ops/dispatch.h"
#include "ops/grouped_gemm_check.h"

namespace moire {
namespace {

void validate(ArgumentCheck& check, const GroupedGemmWgradArgs& args) {
  const TensorView a(args.a), b(args.b);
  const Groups groups(args.groups);
  Weight d(args.d);
  d.layout = MOIRE_OUT_IN;  // which of m and n is `out` does not matter here
  const NamedSize m{"m", a.columns()}, n{"n", b.columns()};
  check.groups(groups);
  const ScaledTensor scaled_a{{"a", a}, {"a_scales", args.a_scales}};
  const ScaledTensor scaled_b{{"b", b}, {"b_scales", args.b_scales}};
  check.ragged("a", a, "a_row_idx", args.a_row_idx, groups, m, kOperandTypes);
  check.ragged("b", b, "b_row_idx", args.b_row_idx, groups, n, kOperandTypes);
  check_columnwise_scales(check, scaled_a, {"a_row_idx", args.a_row_idx}, groups, m);
  check_columnwise_scales(check, scaled_b, {"b_row_idx", args.b_row_idx}, groups, n);
  check_accumulation(check, args.accumulation, scaled_a.data, scaled_b.data);
  check.weight("d", d, kFloatTypes, {"G", groups.num_groups}, m, n);
  check.beta("beta", args.beta, args.beta_per_group, groups);
}

std::string problem_of(const GroupedGemmWgradArgs& args) {
  return problem_text(args.groups, args.a, args.b);
}

}  // namespace

MOIRE_DEFINE_OP_WITH_WORKSPACE(grouped_gemm_wgrad)

}  // namespace moire
