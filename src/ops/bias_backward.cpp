// Validation and dispatch of bias_backward.
#include <moire/grouped_gemm.h>

#include "core/sizes.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

void check_operands(ArgumentCheck& check, const BiasBackwardArgs& args) {
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
  check.enumerator("beta", args.beta, 2);
  check.enumerator("beta_scale", args.beta_scale, 2);
  check.enumerator("tail", args.tail, 2);
}

void check_values(ArgumentCheck& check, const BiasBackwardArgs& args, bool reads_values) {
  if (!check.ok()) return;
  const moire_groups& groups = args.groups;
  if (reads_values && groups.num_groups != 0) {
    check.indices("row_idx", args.row_idx, groups.offsets[groups.num_groups], 0,
                  TensorView(args.grad_y).num_rows());
  }
}

Status check_call(const Context& context, const BiasBackwardArgs& args,
                  ArgumentCheck::Purpose purpose) {
  ArgumentCheck check("bias_backward", context, purpose);
  check_operands(check, args);
  // Offsets are the host's to read on a CPU context that runs.
  const bool reads_values = context.device() == Device::kCpu && !context.is_explaining();
  if (purpose == ArgumentCheck::Purpose::kRun) check_values(check, args, reads_values);
  return check.status();
}

Cost cost_of(const BiasBackwardArgs& args) {
  const TensorView grad_y(args.grad_y), grad_scale(args.grad_scale);
  const int64_t y_bytes =
      product(args.groups.capacity, grad_y.columns(), dtype_size(grad_y.type()));
  const bool accumulates = args.beta != 0 || args.beta_per_group != nullptr;
  return {concat(args.groups.num_groups, " groups, capacity ", args.groups.capacity, ", ", grad_y),
          y_bytes + bytes_of(args.row_idx) + bytes_of(args.scale) +
              (grad_scale.is_present() ? bytes_of(args.bias) : 0) +
              (accumulates ? bytes_of(args.grad_bias) : 0)};
}

}  // namespace

Status bias_backward(const Context& context, const BiasBackwardArgs& args) {
  MOIRE_RETURN_IF_ERROR(check_call(context, args, ArgumentCheck::Purpose::kRun));
  return dispatch(context, "bias_backward", args, [&] { return cost_of(args); });
}

Status bias_backward_workspace(const Context& context, const BiasBackwardArgs& args,
                               size_t* bytes) {
  MOIRE_RETURN_IF_ERROR(check_call(context, args, ArgumentCheck::Purpose::kSizeWorkspace));
  return size_workspace(context, "bias_backward", args, bytes);
}

}  // namespace moire
