// The grouped MLP, backward. From grad_y: FC2 dgrad with the activation's backward in its epilogue
// (grad_z, grad_probs, grad_b1, act again), FC1 dgrad, and the two weight gradients; only the steps
// whose outputs are asked for.
#include <moire/grouped_mlp.h>

#include <optional>

#include "core/argument_check.h"
#include "core/status_macros.h"
#include "mlp/footprint.h"
#include "mlp/operands.h"
#include "mlp/validate.h"

namespace moire {
namespace {

using Purpose = ArgumentCheck::Purpose;

bool is_present(const moire_tensor& t) { return t.rank != 0; }
bool is_present(const moire_weight& w) { return w.tensor.rank != 0; }

// What a call asks for.
struct Needs {
  explicit Needs(const GroupedMlpBackwardArgs& args)
      : grad_z(is_present(args.grad_z) || is_present(args.grad_x) || is_present(args.grad_w1) ||
               is_present(args.grad_b1) || is_present(args.grad_probs)),
        act(is_present(args.grad_w2) || is_present(args.act)),
        scale_from_b2(is_present(args.grad_probs) && is_present(args.b2)) {}
  bool grad_z;         // the FC2 dgrad runs
  bool act;            // FC2's input, for its weight gradient or for the caller
  bool scale_from_b2;  // probs scales b2 as well
};

void check_gradients(ArgumentCheck& check, const GroupedMlpBackwardArgs& args, NamedSize h,
                     NamedSize f) {
  const NamedSize two_f{"2F", 2 * f.size}, capacity{"capacity", args.groups.capacity},
      num_groups{"G", args.groups.num_groups};
  check.optional_tensor("grad_x", args.grad_x, kFloatTypes, {capacity, h});
  check.optional_tensor("grad_z", args.grad_z, kFloatTypes, {capacity, two_f});
  check.same_dtype("grad_z", args.grad_z, "z", args.z);
  if (is_present(args.grad_w1)) {
    check.weight("grad_w1", args.grad_w1, kFloatTypes, num_groups, two_f, h);
  }
  if (is_present(args.grad_w2)) {
    check.weight("grad_w2", args.grad_w2, kFloatTypes, num_groups, h, f);
  }
  check.optional_tensor("grad_b1", args.grad_b1, kFloatTypes, {num_groups, two_f});
  check.optional_tensor("grad_b2", args.grad_b2, kFloatTypes, {num_groups, h});
  check.optional_tensor("grad_probs", args.grad_probs, kFP32Only, {capacity});
  check.enumerator("beta_bias", args.beta_bias, 2);
  check.enumerator("act_is_saved", args.act_is_saved, 2);
}

void check_memory(ArgumentCheck& check, const GroupedMlpBackwardArgs& args) {
  Footprint memory;
  memory.writes("grad_x", args.grad_x)
      .writes("grad_z", args.grad_z)
      .writes("grad_w1", Weight(args.grad_w1))
      .writes("grad_b1", args.grad_b1)
      .writes("grad_w2", Weight(args.grad_w2))
      .writes("grad_b2", args.grad_b2)
      .writes("grad_probs", args.grad_probs)
      .writes(args.workspace)
      .reads("x", args.x)
      .reads("row_idx", args.row_idx)
      .reads("w1", Weight(args.w1))
      .reads("w2", Weight(args.w2))
      .reads("b2", args.b2)
      .reads("probs", args.probs)
      .reads("z", args.z)
      .reads("grad_y", args.grad_y)
      .reads(args.groups);
  if (args.act_is_saved != 0) {
    memory.reads("act", args.act);
  } else {
    memory.writes("act", args.act);
  }
  memory.check(check);
}

Status validate(const Context& context, const GroupedMlpBackwardArgs& args, Purpose purpose) {
  ArgumentCheck check("grouped_mlp_backward", context, purpose);
  const Groups groups(args.groups);
  const Weight w1(args.w1), w2(args.w2);
  const TensorView z(args.z), grad_y(args.grad_y);
  const Needs needs(args);
  const NamedSize capacity{"capacity", groups.capacity}, num_groups{"G", groups.num_groups};
  const NamedSize f{"F", z.columns() / 2}, h{"H", grad_y.columns()}, two_f{"2F", 2 * f.size};
  check_recipe(check, args.recipe);
  check.enumerator("tail", args.tail, 2);
  check.groups(groups);
  check.tensor("z", z, kFloatTypes, {capacity, two_f});
  check.gated(args.activation, args.layout, f.size);
  check_grad_y(check, grad_y, args.gathered_grad_y, args.row_idx, groups, h);
  check.same_dtype("grad_y", grad_y, "z", z);
  check.optional_tensor("probs", args.probs, kFP32Only, {capacity});
  if (needs.grad_z) {
    check.weight("w2", w2, kFloatTypes, num_groups, h, f);
    check.same_dtype("w2", w2.tensor, "grad_y", grad_y);
  }
  if (is_present(args.grad_x)) {
    check.weight("w1", w1, kFloatTypes, num_groups, two_f, h);
    check.same_dtype("w1", w1.tensor, "grad_y", grad_y);
  }
  if (is_present(args.grad_w1)) {
    check.ragged("x", args.x, "row_idx", args.row_idx, groups, h);
    check.same_dtype("x", args.x, "grad_y", grad_y);
  }
  check.require(args.act_is_saved == 0 || is_present(args.act),
                "act_is_saved is 1 but act is absent");
  check.optional_tensor("act", args.act, kFloatTypes, {capacity, f});
  check.same_dtype("act", args.act, "z", z);
  if (needs.scale_from_b2) check.tensor("b2", args.b2, kFloatTypes, {num_groups, h});
  check_gradients(check, args, h, f);
  check_beta(check, "beta_w1", args.beta_w1, args.beta_w1_per_group, groups);
  check_beta(check, "beta_w2", args.beta_w2, args.beta_w2_per_group, groups);
  if (check.ok() && purpose == Purpose::kRun) check_memory(check, args);
  return check.status();
}

struct MlpBackwardSteps {
  std::optional<GroupedGemmGluBackwardArgs> fc2_dgrad;
  std::optional<GluArgs> act;  // where no FC2 dgrad re-emits it
  std::optional<BiasBackwardArgs> b2;
  std::optional<GroupedGemmWgradArgs> fc2_wgrad;
  std::optional<GroupedGemmArgs> fc1_dgrad;
  std::optional<GroupedGemmWgradArgs> fc1_wgrad;

  template <class Runner>
  Status run(Runner& run) {
    if (fc2_dgrad) {
      MOIRE_RETURN_IF_ERROR(
          run(grouped_gemm_glu_backward, grouped_gemm_glu_backward_workspace, *fc2_dgrad));
    }
    if (act) MOIRE_RETURN_IF_ERROR(run(glu, *act));
    if (b2) MOIRE_RETURN_IF_ERROR(run(bias_backward, bias_backward_workspace, *b2));
    if (fc2_wgrad) {
      MOIRE_RETURN_IF_ERROR(run(grouped_gemm_wgrad, grouped_gemm_wgrad_workspace, *fc2_wgrad));
    }
    if (fc1_dgrad) MOIRE_RETURN_IF_ERROR(run(grouped_gemm, grouped_gemm_workspace, *fc1_dgrad));
    if (fc1_wgrad) {
      MOIRE_RETURN_IF_ERROR(run(grouped_gemm_wgrad, grouped_gemm_wgrad_workspace, *fc1_wgrad));
    }
    return {};
  }
};

GroupedGemmGluBackwardArgs fc2_dgrad_args(const GroupedMlpBackwardArgs& args,
                                          const RaggedOperand& grad_y, const TensorView& grad_z,
                                          const TensorView& act) {
  GroupedGemmGluBackwardArgs gemm;
  gemm.grad_y = grad_y.tensor;
  gemm.row_idx = grad_y.row_idx;
  gemm.w2 = args.w2;
  gemm.z = args.z;
  gemm.probs = args.probs;
  gemm.grad_z = grad_z;
  gemm.act = act;
  gemm.grad_probs = args.grad_probs;
  gemm.grad_bias = args.grad_b1;
  gemm.beta = args.beta_bias;
  gemm.groups = args.groups;
  gemm.activation = args.activation;
  gemm.layout = args.layout;
  // grad_z and act are internals, whose tails keep whatever was there; grad_probs alone is an
  // output.
  gemm.tail = args.tail;
  return gemm;
}

GluArgs act_args(const GroupedMlpBackwardArgs& args, const TensorView& act) {
  GluArgs glu_args;
  glu_args.z = args.z;
  glu_args.probs = args.probs;
  glu_args.act = act;
  glu_args.groups = args.groups;
  glu_args.activation = args.activation;
  glu_args.layout = args.layout;
  glu_args.tail = MOIRE_TAIL_UNTOUCHED;
  return glu_args;
}

// grad_b2, and the share of grad_probs that comes through probs * b2, added to what FC2's dgrad
// wrote.
BiasBackwardArgs b2_args(const GroupedMlpBackwardArgs& args, const RaggedOperand& grad_y,
                         bool scale_from_b2) {
  BiasBackwardArgs bias;
  bias.grad_y = grad_y.tensor;
  bias.row_idx = grad_y.row_idx;
  bias.scale = args.probs;
  bias.grad_bias = args.grad_b2;
  bias.beta = args.beta_bias;
  if (scale_from_b2) {
    bias.bias = args.b2;
    bias.grad_scale = args.grad_probs;
    bias.beta_scale = 1;
  }
  bias.groups = args.groups;
  bias.tail = args.tail;
  return bias;
}

GroupedGemmArgs fc1_dgrad_args(const GroupedMlpBackwardArgs& args, const TensorView& grad_z) {
  GroupedGemmArgs gemm;
  gemm.a = grad_z;
  gemm.b = args.w1;
  gemm.transpose_b = 1;
  gemm.d = args.grad_x;
  gemm.groups = args.groups;
  gemm.tail = args.tail;
  return gemm;
}

MlpBackwardSteps steps_of(const GroupedMlpBackwardArgs& args, Arena& arena) {
  const Needs needs(args);
  const TensorView z(args.z);
  const int64_t capacity = args.groups.capacity;
  TensorView grad_z(args.grad_z), act(args.act);
  if (needs.grad_z && !grad_z.is_present()) grad_z = arena.take(z.type(), capacity, z.columns());
  if (needs.act && !act.is_present()) act = arena.take(z.type(), capacity, z.columns() / 2);
  const RaggedOperand x{args.x, args.row_idx};
  const RaggedOperand grad_y{args.grad_y,
                             args.gathered_grad_y != 0 ? args.row_idx : moire_tensor{}};

  MlpBackwardSteps steps;
  const bool act_is_made = needs.act && args.act_is_saved == 0;
  if (needs.grad_z) {
    steps.fc2_dgrad = fc2_dgrad_args(args, grad_y, grad_z, act_is_made ? act : TensorView());
  } else if (act_is_made) {
    steps.act = act_args(args, act);
  }
  if (is_present(args.grad_b2) || needs.scale_from_b2) {
    steps.b2 = b2_args(args, grad_y, needs.scale_from_b2);
  }
  if (is_present(args.grad_w2)) {
    steps.fc2_wgrad = wgrad_args(grad_y, {act, TensorView()}, args.grad_w2, args.beta_w2,
                                 args.beta_w2_per_group, args.groups);
  }
  if (is_present(args.grad_x)) steps.fc1_dgrad = fc1_dgrad_args(args, grad_z);
  if (is_present(args.grad_w1)) {
    steps.fc1_wgrad = wgrad_args({grad_z, TensorView()}, x, args.grad_w1, args.beta_w1,
                                 args.beta_w1_per_group, args.groups);
  }
  return steps;
}

}  // namespace

Status grouped_mlp_backward(const Context& context, const GroupedMlpBackwardArgs& args) {
  MOIRE_RETURN_IF_ERROR(validate(context, args, Purpose::kRun));
  Arena arena(args.workspace);
  MlpBackwardSteps steps = steps_of(args, arena);
  return run_steps("grouped_mlp_backward", context, steps, args.workspace, arena.used());
}

Status grouped_mlp_backward_workspace(const Context& context, const GroupedMlpBackwardArgs& args,
                                      size_t* bytes) {
  MOIRE_RETURN_IF_ERROR(validate(context, args, Purpose::kSizeWorkspace));
  Arena arena;
  MlpBackwardSteps steps = steps_of(args, arena);
  return size_steps(context, steps, arena.used(), bytes);
}

}  // namespace moire
