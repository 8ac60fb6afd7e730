// FC1 and FC2's dgrad as the plain product, then the activation's own kernel: where a product's
// kernels have no epilogue for the activation. What lies between them is in the workspace where the
// caller does not keep it; bits are those of an epilogue (docs/semantics.md, fused = unfused).
// Where FP8 copies are left to a call, its activation makes them (glu_copies.h).
#pragma once

#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/glu_copies.h"
#include "backend/cuda/ops/quantize.h"
#include "core/format.h"
#include "core/glu_layout.h"
#include "core/glu_storage.h"
#include "core/status_macros.h"

namespace moire::cuda::ops {

// Whether kernels that have the activation in an epilogue have this one.
inline bool has_epilogue(const moire_activation& activation, const moire_glu_layout& layout) {
  return is_gated(layout) && activation.kind <= MOIRE_GEGLU_TANH;
}

// Whether a call leaves these to its activation.
inline bool are_present(const QuantizeArgs& copies) {
  return is_present(copies.rowwise) || is_present(copies.columnwise);
}

// A product, and the activation's op behind it.
struct Apart {
  size_t workspace() const { return arena.used(); }

  // What the two take of the call alike.
  void take(const auto& args, auto& glu) {
    glu.probs = args.probs;
    glu.act = args.act;
    glu.groups = args.groups;
    glu.activation = args.activation;
    glu.layout = args.layout;
    glu.tail = args.tail;
    product.row_idx = args.row_idx;
    product.groups = args.groups;
    product.tail = MOIRE_TAIL_UNTOUCHED;
    product.accumulation = args.accumulation;
  }
  // The rest of the workspace becomes the product's.
  void give_rest(const Implementation<GroupedGemmArgs>& implementation) {
    product.workspace = arena.rest();
    arena.take(static_cast<int64_t>(implementation.workspace(state, product)));
  }

  const DeviceState& state;
  Arena arena;
  GroupedGemmArgs product = {};
};

// z = a * b^T + bias, then act = glu(z) * probs.
template <const Product& kProduct>
struct GluApart : Apart {
  GluApart(const DeviceState& device, const GroupedGemmGluArgs& args, const Workspace& workspace)
      : Apart{device, Arena(workspace)} {
    const int64_t rows = args.groups.capacity, columns = Weight(args.b).out_features();
    const DType storage = glu_storage(args);
    copies.act = quantize_args(args.act_rowwise, args.act_columnwise, args);
    GluArgs& glu = copies.glu;
    take(args, glu);
    glu.z = is_present(args.z) ? args.z : arena.take_aligned(storage, rows, columns);
    product.a = args.a;
    product.a_scales = args.a_scales;
    product.b = args.b;
    product.b_scales = args.b_scales;
    product.bias = args.bias;
    product.d = glu.z;
    give_rest(kProduct);
  }

  Reason supports() const {
    if (const Reason reason = kProduct.supports(state, product)) return reason;
    return makes_copies() ? copies.supports() : kGlu.supports(state, copies.glu);
  }
  std::string policy() const {
    return concat(kProduct.policy(state, product), ", then the activation",
                  makes_copies() ? ", act quantised in the same pass" : "");
  }
  int64_t launches() const { return 1 + launches_of(kProduct, state, product); }
  Status run(const Context& context) const {
    MOIRE_RETURN_IF_ERROR(kProduct.run_as(context, "grouped_gemm_glu", product));
    return makes_copies() ? copies.run(context) : kGlu.run(context, copies.glu);
  }
  bool makes_copies() const { return are_present(copies.act); }

  GluCopies copies;
};
template <const Product& kProduct>
inline constexpr Implementation<GroupedGemmGluArgs> kGluApart =
    implementation_of<GroupedGemmGluArgs, GluApart<kProduct>>("apart");

// grad_act = grad_y * w2, then grad_z, act and grad_probs; grad_bias from grad_z, stored or not.
template <const Product& kProduct>
struct GluBackwardApart : Apart {
  GluBackwardApart(const DeviceState& device, const GroupedGemmGluBackwardArgs& args,
                   const Workspace& workspace)
      : Apart{device, Arena(workspace)} {
    copies.grad_z = quantize_args(args.grad_z_rowwise, args.grad_z_columnwise, args);
    copies.act = quantize_args({}, args.act_columnwise, args);
    GluBackwardArgs& glu = copies.glu;
    take(args, glu);
    glu.z = args.z;
    glu.grad_act = arena.take_aligned(TensorView(args.z).type(), args.groups.capacity,
                                      Weight(args.w2).in_features());
    glu.grad_z = args.grad_z;
    glu.grad_probs = args.grad_probs;
    if (makes_copies()) {
      copies.grad_bias = args.grad_bias;
      copies.beta = args.beta;
      copies.take_parts(arena);
    } else if (is_present(args.grad_bias)) {
      bias.grad_y = args.grad_z;
      bias.grad_bias = args.grad_bias;
      bias.beta = args.beta;
      bias.groups = args.groups;
      bias.workspace.bytes = kBiasBackward.workspace(state, bias);
      bias.workspace.data = arena.take(static_cast<int64_t>(bias.workspace.bytes));
    }
    product.a = args.grad_y;
    product.a_scales = args.grad_y_scales;
    product.b = args.w2;
    product.b_scales = args.w2_scales;
    product.transpose_b = 1;
    product.d = glu.grad_act;
    give_rest(kProduct);
  }

  Reason supports() const {
    if (const Reason reason = kProduct.supports(state, product)) {
      return concat("of the product of a = grad_y and b = w2: ", *reason);
    }
    return makes_copies() ? copies.supports() : kGluBackward.supports(state, copies.glu);
  }
  std::string policy() const {
    return concat(kProduct.policy(state, product), ", then the activation's backward",
                  makes_copies() ? ", what it gives quantised in the same pass" : "",
                  is_present(copies.grad_bias) ? ", grad_bias summed" : "",
                  has_bias() ? " and a pass over grad_z for grad_bias" : "");
  }
  int64_t launches() const {
    return (makes_copies() ? copies.launches() : 1) + launches_of(kProduct, state, product) +
           (has_bias() ? launches_of(kBiasBackward, state, bias) : 0);
  }
  Status run(const Context& context) const {
    MOIRE_RETURN_IF_ERROR(kProduct.run_as(context, "grouped_gemm_glu_backward", product));
    if (makes_copies()) return copies.run(context);
    MOIRE_RETURN_IF_ERROR(kGluBackward.run(context, copies.glu));
    return has_bias() ? kBiasBackward.run(context, bias) : Status();
  }
  bool has_bias() const { return is_present(bias.grad_bias); }
  bool makes_copies() const { return are_present(copies.grad_z); }

  GluBackwardCopies copies;
  BiasBackwardArgs bias;
};
template <const Product& kProduct>
inline constexpr Implementation<GroupedGemmGluBackwardArgs> kGluBackwardApart =
    implementation_of<GroupedGemmGluBackwardArgs, GluBackwardApart<kProduct>>("apart");

}  // namespace moire::cuda::ops
