// grouped_gemm_wgrad: validation and dispatch.
#include <moire/grouped_gemm.h>

#include <cstdint>

#include "ops/dispatch.h"
#include "ops/grouped_gemm_check.h"

namespace moire {
namespace {

using Purpose = ArgumentCheck::Purpose;

void check_beta(ArgumentCheck& check, const GroupedGemmWgradArgs& args) {
  check.enumerator("beta", args.beta, 2);
  if (args.beta_per_group == nullptr || !check.ok() || !check.reads_values()) return;
  for (int64_t g = 0; check.ok() && g < args.groups.num_groups; ++g) {
    check.require(args.beta_per_group[g] <= 1, "beta_per_group[", g, "] is ",
                  args.beta_per_group[g], ", must be 0 or 1");
  }
}

Status validate(const Context& context, const GroupedGemmWgradArgs& args, Purpose purpose) {
  ArgumentCheck check("grouped_gemm_wgrad", context, purpose);
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
  check_beta(check, args);
  return check.status();
}

Cost cost_of(const GroupedGemmWgradArgs& args) {
  const bool reads_d = args.beta != 0 || args.beta_per_group != nullptr;
  return {problem_text(args.groups, args.a, args.b),
          bytes_read(args.a, args.a_row_idx, args.groups) +
              bytes_read(args.b, args.b_row_idx, args.groups) + bytes_of(args.a_scales) +
              bytes_of(args.b_scales) + (reads_d ? bytes_of(args.d.tensor) : 0)};
}

}  // namespace

Status grouped_gemm_wgrad(const Context& context, const GroupedGemmWgradArgs& args) {
  MOIRE_RETURN_IF_ERROR(validate(context, args, Purpose::kRun));
  return dispatch(context, "grouped_gemm_wgrad", args, [&] { return cost_of(args); });
}

Status grouped_gemm_wgrad_workspace(const Context& context, const GroupedGemmWgradArgs& args,
                                    size_t* bytes) {
  MOIRE_RETURN_IF_ERROR(validate(context, args, Purpose::kSizeWorkspace));
  return size_workspace(context, "grouped_gemm_wgrad", args, bytes);
}

}  // namespace moire
