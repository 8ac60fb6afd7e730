// The grouped linear layer: y = x W^T (+ scale * bias), and its gradients; each is one op.
#include <moire/grouped_mlp.h>

#include <optional>

#include "core/argument_check.h"
#include "core/status_macros.h"
#include "mlp/footprint.h"
#include "mlp/operands.h"
#include "mlp/steps.h"
#include "mlp/validate.h"

namespace moire {
namespace {

using Purpose = ArgumentCheck::Purpose;

Status validate(const Context& context, const GroupedLinearArgs& args, Purpose purpose) {
  ArgumentCheck check("grouped_linear", context, purpose);
  const Groups groups(args.groups);
  const Weight w(args.w);
  const NamedSize capacity{"capacity", groups.capacity}, num_groups{"G", groups.num_groups};
  const NamedSize in{"in", w.in_features()}, out{"out", w.out_features()};
  check_recipe(check, args.recipe);
  check.enumerator("tail", args.tail, 2);
  check.groups(groups);
  check.weight("w", w, kFloatTypes, num_groups, out, in);
  check.ragged("x", args.x, "row_idx", args.row_idx, groups, in);
  check.same_dtype("x", args.x, "w", w.tensor);
  check.optional_tensor("bias", args.bias, kFloatTypes, {num_groups, out});
  check.optional_tensor("scale", args.scale, kFP32Only, {capacity});
  check.require(args.scale.rank == 0 || args.bias.rank != 0,
                "scale is present but bias is absent: it would scale nothing");
  check.tensor("y", args.y, kFloatTypes, {capacity, out});
  if (!check.ok() || purpose == Purpose::kSizeWorkspace) return check.status();
  Footprint()
      .writes("y", args.y)
      .writes(args.workspace)
      .reads("x", args.x)
      .reads("row_idx", args.row_idx)
      .reads("w", w)
      .reads("bias", args.bias)
      .reads("scale", args.scale)
      .reads(args.groups)
      .check(check);
  return check.status();
}

struct LinearSteps {
  GroupedGemmArgs gemm;

  template <class Runner>
  Status run(Runner& run) {
    return run(grouped_gemm, grouped_gemm_workspace, gemm);
  }
};

LinearSteps steps_of(const GroupedLinearArgs& args) {
  GroupedGemmArgs gemm;
  gemm.a = args.x;
  gemm.row_idx = args.row_idx;
  gemm.b = args.w;
  gemm.bias = args.bias;
  gemm.bias_scale = args.scale;
  gemm.d = args.y;
  gemm.groups = args.groups;
  gemm.tail = args.tail;
  return LinearSteps{gemm};
}

Status validate(const Context& context, const GroupedLinearBackwardArgs& args, Purpose purpose) {
  ArgumentCheck check("grouped_linear_backward", context, purpose);
  const Groups groups(args.groups);
  const TensorView grad_y(args.grad_y), grad_x(args.grad_x), grad_bias(args.grad_bias),
      grad_scale(args.grad_scale);
  const Weight w(args.w), grad_w(args.grad_w);
  const NamedSize capacity{"capacity", groups.capacity}, num_groups{"G", groups.num_groups};
  check_recipe(check, args.recipe);
  check.enumerator("tail", args.tail, 2);
  check.groups(groups);
  const NamedSize out{"out", grad_y.columns()};
  check_grad_y(check, grad_y, args.gathered_grad_y, args.row_idx, groups, out);
  const int64_t in_of_x = TensorView(args.x.rank != 0 ? args.x : args.grad_x).columns();
  const NamedSize in{"in", agreed_size(in_of_x, w.in_features(), grad_w.in_features())};
  if (grad_x.is_present()) {
    check.tensor("grad_x", grad_x, kFloatTypes, {capacity, in});
    check.weight("w", w, kFloatTypes, num_groups, out, in);
    check.same_dtype("grad_y", grad_y, "w", w.tensor);
  }
  if (grad_w.is_present()) {
    check.ragged("x", args.x, "row_idx", args.row_idx, groups, in);
    check.weight("grad_w", grad_w, kFloatTypes, num_groups, out, in);
    check.same_dtype("grad_y", grad_y, "x", args.x);
  }
  check.optional_tensor("scale", args.scale, kFP32Only, {capacity});
  check.optional_tensor("grad_bias", grad_bias, kFloatTypes, {num_groups, out});
  if (grad_scale.is_present()) {
    check.tensor("grad_scale", grad_scale, kFP32Only, {capacity});
    check.tensor("bias", args.bias, kFloatTypes, {num_groups, out});
  }
  check_beta(check, "beta", args.beta, args.beta_per_group, groups);
  if (!check.ok() || purpose == Purpose::kSizeWorkspace) return check.status();
  Footprint()
      .writes("grad_x", grad_x)
      .writes("grad_w", grad_w)
      .writes("grad_bias", grad_bias)
      .writes("grad_scale", grad_scale)
      .writes(args.workspace)
      .reads("x", args.x)
      .reads("row_idx", args.row_idx)
      .reads("w", w)
      .reads("bias", args.bias)
      .reads("scale", args.scale)
      .reads("grad_y", grad_y)
      .reads(args.groups)
      .check(check);
  return check.status();
}

struct LinearBackwardSteps {
  std::optional<BiasBackwardArgs> bias;
  std::optional<GroupedGemmArgs> grad_x;
  std::optional<GroupedGemmWgradArgs> grad_w;

  template <class Runner>
  Status run(Runner& run) {
    if (bias) MOIRE_RETURN_IF_ERROR(run(bias_backward, bias_backward_workspace, *bias));
    if (grad_x) MOIRE_RETURN_IF_ERROR(run(grouped_gemm, grouped_gemm_workspace, *grad_x));
    if (grad_w)
      MOIRE_RETURN_IF_ERROR(run(grouped_gemm_wgrad, grouped_gemm_wgrad_workspace, *grad_w));
    return {};
  }
};

LinearBackwardSteps steps_of(const GroupedLinearBackwardArgs& args) {
  LinearBackwardSteps steps;
  const RaggedOperand x{args.x, args.row_idx};
  const RaggedOperand grad_y{args.grad_y,
                             args.gathered_grad_y != 0 ? args.row_idx : moire_tensor{}};
  if (TensorView(args.grad_bias).is_present() || TensorView(args.grad_scale).is_present()) {
    BiasBackwardArgs& bias = steps.bias.emplace();
    bias.grad_y = grad_y.tensor;
    bias.row_idx = grad_y.row_idx;
    bias.scale = args.scale;
    bias.bias = TensorView(args.grad_scale).is_present() ? args.bias : moire_tensor{};
    bias.grad_bias = args.grad_bias;
    bias.grad_scale = args.grad_scale;
    bias.beta = args.beta;
    bias.beta_per_group = args.beta_per_group;
    bias.groups = args.groups;
    bias.tail = args.tail;
  }
  if (TensorView(args.grad_x).is_present()) {
    GroupedGemmArgs& gemm = steps.grad_x.emplace();
    gemm.a = grad_y.tensor;
    gemm.row_idx = grad_y.row_idx;
    gemm.b = args.w;
    gemm.transpose_b = 1;
    gemm.d = args.grad_x;
    gemm.groups = args.groups;
    gemm.tail = args.tail;
  }
  if (Weight(args.grad_w).is_present()) {
    steps.grad_w = wgrad_args(grad_y, x, args.grad_w, args.beta, args.beta_per_group, args.groups);
  }
  return steps;
}

}  // namespace

Status grouped_linear(const Context& context, const GroupedLinearArgs& args) {
  MOIRE_RETURN_IF_ERROR(validate(context, args, Purpose::kRun));
  LinearSteps steps = steps_of(args);
  return run_steps("grouped_linear", context, steps, args.workspace, 0);
}

Status grouped_linear_workspace(const Context& context, const GroupedLinearArgs& args,
                                size_t* bytes) {
  MOIRE_RETURN_IF_ERROR(validate(context, args, Purpose::kSizeWorkspace));
  LinearSteps steps = steps_of(args);
  return size_steps(context, steps, 0, bytes);
}

Status grouped_linear_backward(const Context& context, const GroupedLinearBackwardArgs& args) {
  MOIRE_RETURN_IF_ERROR(validate(context, args, Purpose::kRun));
  LinearBackwardSteps steps = steps_of(args);
  return run_steps("grouped_linear_backward", context, steps, args.workspace, 0);
}

Status grouped_linear_backward_workspace(const Context& context,
                                         const GroupedLinearBackwardArgs& args, size_t* bytes) {
  MOIRE_RETURN_IF_ERROR(validate(context, args, Purpose::kSizeWorkspace));
  LinearBackwardSteps steps = steps_of(args);
  return size_steps(context, steps, 0, bytes);
}

}  // namespace moire
