// FC1 and FC2's dgrad as the plain product, then the activation's own kernel: where a product's
// kernels have no epilogue for the activation. What lies between them is in the workspace where the
// caller does not keep it; bits are those of an epilogue (docs/semantics.md, fused = unfused).
#pragma once

#include "backend/cuda/implementations.h"
#include "core/arena.h"
#include "core/format.h"
#include "core/glu_layout.h"
#include "core/glu_storage.h"
#include "core/status_macros.h"

namespace moire::cuda::ops {

// Whether kernels that have the activation in an epilogue have this one.
inline bool has_epilogue(const moire_activation& activation, const moire_glu_layout& layout) {
  return is_gated(layout) && activation.kind <= MOIRE_GEGLU_TANH;
}

// The rest of the workspace becomes the product's; how much of all of it is used.
template <const Implementation<GroupedGemmArgs>& kProduct>
size_t give_rest(const DeviceState& state, Arena& arena, GroupedGemmArgs& product) {
  product.workspace = arena.rest();
  arena.take(static_cast<int64_t>(kProduct.workspace(state, product)));
  return arena.used();
}

// z = a * b^T + bias, then act = glu(z) * probs. kMultiply is kProduct's run, as a step of the op
// that it is told.
template <const Implementation<GroupedGemmArgs>& kProduct, Multiply& kMultiply>
struct GluApart {
  GluApart(const DeviceState& state, const GroupedGemmGluArgs& args, Workspace workspace) {
    Arena arena(workspace);
    const int64_t rows = args.groups.capacity, columns = Weight(args.b).out_features();
    const DType storage = glu_storage(args);
    glu.z = is_present(args.z) ? args.z : arena.take_aligned(storage, rows, columns);
    glu.act = args.act;
    glu.probs = args.probs;
    glu.groups = args.groups;
    glu.activation = args.activation;
    glu.layout = args.layout;
    glu.tail = args.tail;
    product.a = args.a;
    product.a_scales = args.a_scales;
    product.row_idx = args.row_idx;
    product.b = args.b;
    product.b_scales = args.b_scales;
    product.bias = args.bias;
    product.d = glu.z;
    product.groups = args.groups;
    product.tail = MOIRE_TAIL_UNTOUCHED;
    product.accumulation = args.accumulation;
    used = give_rest<kProduct>(state, arena, product);
  }
  GroupedGemmArgs product;
  GluArgs glu;
  size_t used;

  static Reason supports(const DeviceState& state, const GroupedGemmGluArgs& args) {
    const GluApart steps(state, args, {});
    const Reason reason = kProduct.supports(state, steps.product);
    return reason ? reason : kGlu.supports(state, steps.glu);
  }
  static size_t workspace(const DeviceState& state, const GroupedGemmGluArgs& args) {
    return GluApart(state, args, {}).used;
  }
  static std::string policy(const DeviceState& state, const GroupedGemmGluArgs& args) {
    return kProduct.policy(state, GluApart(state, args, {}).product) + ", then the activation";
  }
  static Status run(const Context& context, const GroupedGemmGluArgs& args) {
    const GluApart steps(context.state(), args, args.workspace);
    MOIRE_RETURN_IF_ERROR(kMultiply(context, "grouped_gemm_glu", steps.product));
    return kGlu.run(context, steps.glu);
  }
  static int64_t launches(const DeviceState& state, const GroupedGemmGluArgs& args) {
    return 1 + launches_of(kProduct, state, GluApart(state, args, {}).product);
  }
  static constexpr Implementation<GroupedGemmGluArgs> kOp = {
      "apart", Device::kCuda, supports, workspace, policy, run, launches};
};

// grad_act = grad_y * w2, then grad_z, act and grad_probs; grad_bias from the stored grad_z.
template <const Implementation<GroupedGemmArgs>& kProduct, Multiply& kMultiply>
struct GluBackwardApart {
  GluBackwardApart(const DeviceState& state, const GroupedGemmGluBackwardArgs& args,
                   Workspace workspace) {
    Arena arena(workspace);
    glu.z = args.z;
    glu.probs = args.probs;
    glu.grad_act = arena.take_aligned(TensorView(args.z).type(), args.groups.capacity,
                                      Weight(args.w2).in_features());
    glu.grad_z = args.grad_z;
    glu.act = args.act;
    glu.grad_probs = args.grad_probs;
    glu.groups = args.groups;
    glu.activation = args.activation;
    glu.layout = args.layout;
    glu.tail = args.tail;
    if (is_present(args.grad_bias)) {
      bias.grad_y = args.grad_z;
      bias.grad_bias = args.grad_bias;
      bias.beta = args.beta;
      bias.groups = args.groups;
      bias.workspace.bytes = kBiasBackward.workspace(state, bias);
      bias.workspace.data = arena.take(static_cast<int64_t>(bias.workspace.bytes));
    }
    product.a = args.grad_y;
    product.a_scales = args.grad_y_scales;
    product.row_idx = args.row_idx;
    product.b = args.w2;
    product.b_scales = args.w2_scales;
    product.transpose_b = 1;
    product.d = glu.grad_act;
    product.groups = args.groups;
    product.tail = MOIRE_TAIL_UNTOUCHED;
    product.accumulation = args.accumulation;
    used = give_rest<kProduct>(state, arena, product);
  }
  bool has_bias() const { return is_present(bias.grad_bias); }

  GroupedGemmArgs product;
  GluBackwardArgs glu;
  BiasBackwardArgs bias;
  size_t used;

  static Reason supports(const DeviceState& state, const GroupedGemmGluBackwardArgs& args) {
    const GluBackwardApart steps(state, args, {});
    if (const Reason reason = kProduct.supports(state, steps.product)) {
      return concat("of the product of a = grad_y and b = w2: ", *reason);
    }
    return kGluBackward.supports(state, steps.glu);
  }
  static size_t workspace(const DeviceState& state, const GroupedGemmGluBackwardArgs& args) {
    return GluBackwardApart(state, args, {}).used;
  }
  static std::string policy(const DeviceState& state, const GroupedGemmGluBackwardArgs& args) {
    const GluBackwardApart steps(state, args, {});
    return concat(kProduct.policy(state, steps.product), ", then the activation's backward",
                  steps.has_bias() ? " and a pass over grad_z for grad_bias" : "");
  }
  static Status run(const Context& context, const GroupedGemmGluBackwardArgs& args) {
    const GluBackwardApart steps(context.state(), args, args.workspace);
    MOIRE_RETURN_IF_ERROR(kMultiply(context, "grouped_gemm_glu_backward", steps.product));
    MOIRE_RETURN_IF_ERROR(kGluBackward.run(context, steps.glu));
    return steps.has_bias() ? kBiasBackward.run(context, steps.bias) : Status();
  }
  static int64_t launches(const DeviceState& state, const GroupedGemmGluBackwardArgs& args) {
    const GluBackwardApart steps(state, args, {});
    return 1 + launches_of(kProduct, state, steps.product) +
           (steps.has_bias() ? launches_of(kBiasBackward, state, steps.bias) : 0);
  }
  static constexpr Implementation<GroupedGemmGluBackwardArgs> kOp = {
      "apart", Device::kCuda, supports, workspace, policy, run, launches};
};

}  // namespace moire::cuda::ops
