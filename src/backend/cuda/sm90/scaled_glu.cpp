// FC1 and FC2's dgrad on Hopper's FP8 tensor cores: the plain product, then the activation's own
// kernel. What lies between them is in the workspace where the caller does not keep it.
#include "backend/cuda/implementations.h"
#include "backend/cuda/sm90/reasons.h"
#include "backend/cuda/sm90/scaled_products.h"
#include "core/arena.h"
#include "core/format.h"
#include "core/glu_storage.h"
#include "core/status_macros.h"

namespace moire::cuda::sm90::scaled {
namespace {

// The rest of the workspace becomes the product's; how much of all of it is used.
size_t give_rest(const DeviceState& state, Arena& arena, GroupedGemmArgs& product) {
  product.workspace = arena.rest();
  arena.take(static_cast<int64_t>(kGroupedGemm.workspace(state, product)));
  return arena.used();
}

// z = a * b^T + bias, then act = glu(z) * probs.
struct Forward {
  Forward(const DeviceState& state, const GroupedGemmGluArgs& args, Workspace workspace) {
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
    used = give_rest(state, arena, product);
  }
  GroupedGemmArgs product;
  GluArgs glu;
  size_t used;
};

Reason supports(const DeviceState& state, const GroupedGemmGluArgs& args) {
  const Forward steps(state, args, {});
  const Reason reason = kGroupedGemm.supports(state, steps.product);
  return reason ? reason : ops::kGlu.supports(state, steps.glu);
}

Status run(const Context& context, const GroupedGemmGluArgs& args) {
  const Forward steps(context.state(), args, args.workspace);
  MOIRE_RETURN_IF_ERROR(multiply(context, "grouped_gemm_glu", steps.product));
  return ops::kGlu.run(context, steps.glu);
}

// grad_act = grad_y * w2, then grad_z, act and grad_probs; grad_bias from the stored grad_z.
struct Backward {
  Backward(const DeviceState& state, const GroupedGemmGluBackwardArgs& args, Workspace workspace) {
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
      bias.workspace.bytes = ops::kBiasBackward.workspace(state, bias);
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
    used = give_rest(state, arena, product);
  }
  bool has_bias() const { return is_present(bias.grad_bias); }

  GroupedGemmArgs product;
  GluBackwardArgs glu;
  BiasBackwardArgs bias;
  size_t used;
};

Reason supports(const DeviceState& state, const GroupedGemmGluBackwardArgs& args) {
  const Backward steps(state, args, {});
  if (const Reason reason = kGroupedGemm.supports(state, steps.product)) {
    return concat("of the product of a = grad_y and b = w2: ", *reason);
  }
  return ops::kGluBackward.supports(state, steps.glu);
}

Status run(const Context& context, const GroupedGemmGluBackwardArgs& args) {
  const Backward steps(context.state(), args, args.workspace);
  MOIRE_RETURN_IF_ERROR(multiply(context, "grouped_gemm_glu_backward", steps.product));
  MOIRE_RETURN_IF_ERROR(ops::kGluBackward.run(context, steps.glu));
  return steps.has_bias() ? ops::kBiasBackward.run(context, steps.bias) : Status();
}

}  // namespace

const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu = {
    "sm90",
    Device::kCuda,
    supports,
    [](const DeviceState& state, const GroupedGemmGluArgs& args) {
      return Forward(state, args, {}).used;
    },
    [](const DeviceState& state, const GroupedGemmGluArgs& args) {
      return concat(kGroupedGemm.policy(state, Forward(state, args, {}).product),
                    ", then the activation");
    },
    run,
    [](const DeviceState& state, const GroupedGemmGluArgs& args) -> int64_t {
      return 1 + kGroupedGemm.launches(state, Forward(state, args, {}).product);
    }};

const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward = {
    "sm90",
    Device::kCuda,
    supports,
    [](const DeviceState& state, const GroupedGemmGluBackwardArgs& args) {
      return Backward(state, args, {}).used;
    },
    [](const DeviceState& state, const GroupedGemmGluBackwardArgs& args) {
      const Backward steps(state, args, {});
      return concat(kGroupedGemm.policy(state, steps.product), ", then the activation's backward",
                    steps.has_bias() ? " and a pass over grad_z for grad_bias" : "");
    },
    run,
    [](const DeviceState& state, const GroupedGemmGluBackwardArgs& args) -> int64_t {
      const Backward steps(state, args, {});
      return 1 + kGroupedGemm.launches(state, steps.product) +
             (steps.has_bias() ? ops::kBiasBackward.launches(state, steps.bias) : 0);
    }};

}  // namespace moire::cuda::sm90::scaled
