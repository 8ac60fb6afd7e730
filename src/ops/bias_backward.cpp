// Validation and dispatch of bias_backward.
#include <moire/grouped_gemm.h>

#include "ops/dispatch.h"

namespace moire {
namespace {

void validate(ArgumentCheck& check, const BiasBackwardArgs& args) {
  const TensorView grad_y(args.grad_y), row_idx(args.row_idx);
  const int64_t capacity = args.groups.capacity, num_groups = args.groups.num_groups;
  const NamedSize g{"G", num_groups}, rows{"capacity", capacity};
  check.groups(args.groups);
  if (!check.ranked("grad_y", grad_y, kFloatTypes, 2)) return;
  const NamedSize n{"n", grad_y.columns()};
  if (row_idx.is_present()) {
    check.tensor("row_idx", row_idx, kIndexTypes, {rows});
  } else {
    check.require(grad_y.num_rows() == capacity, "grad_y is ", grad_y, " but groups.capacity is ",
                  capacity);
  }
  check.optional_tensor("scale", args.scale, kFP32Only, {rows});
  check.optional_tensor("grad_bias", args.grad_bias, kFloatTypes, {g, n});
  check.optional_tensor("grad_scale", args.grad_scale, kFP32Only, {rows});
  if (TensorView(args.grad_scale).is_present()) {
    check.tensor("bias", args.bias, kFloatTypes, {g, n});
  } else {
    check.optional_tensor("bias", args.bias, kFloatTypes, {g, n});
  }
  check.beta("beta", args.beta, args.beta_per_group, args.groups);
  check.enumerator("beta_scale", args.beta_scale, 2);
  check.enumerator("tail", args.tail, 2);
  if (check.ok() && check.reads_values() && num_groups != 0) {
    check.indices("row_idx", row_idx, args.groups.offsets[num_groups], 0, grad_y.num_rows());
  }
}

std::string problem_of(const BiasBackwardArgs& args) {
  return concat(args.groups.num_groups, " groups, capacity ", args.groups.capacity, ", ",
                TensorView(args.grad_y));
}

}  // namespace

MOIRE_DEFINE_OP_WITH_WORKSPACE(bias_backward)

}  // namespace moire
