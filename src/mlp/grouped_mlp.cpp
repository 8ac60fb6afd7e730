// The grouped MLP, forward: FC1 with the activation in its epilogue, then FC2.
#include <moire/grouped_mlp.h>

#include "core/argument_check.h"
#include "core/status_macros.h"
#include "mlp/footprint.h"
#include "mlp/validate.h"

namespace moire {
namespace {

using Purpose = ArgumentCheck::Purpose;

// F as the saved tensors or b1 have it, to settle a difference of w1 and w2; 0 if none is there.
int64_t width_beside_weights(const GroupedMlpArgs& args) {
  if (args.act.rank != 0) return TensorView(args.act).columns();
  return TensorView(args.z.rank != 0 ? args.z : args.b1).columns() / 2;
}

int64_t width_of(const GroupedMlpArgs& args, const Weight& w1, const Weight& w2) {
  const int64_t two_f = w1.out_features();
  const int64_t first = two_f % 2 == 0 ? two_f / 2 : w2.in_features();
  return agreed_size(first, width_beside_weights(args), w2.in_features());
}

Status validate(const Context& context, const GroupedMlpArgs& args, Purpose purpose) {
  ArgumentCheck check("grouped_mlp", context, purpose);
  const Groups groups(args.groups);
  const Weight w1(args.w1), w2(args.w2);
  const TensorView x(args.x);
  const NamedSize capacity{"capacity", groups.capacity}, num_groups{"G", groups.num_groups};
  const NamedSize h{"H", agreed_size(x.columns(), w1.in_features(), w2.out_features())};
  const NamedSize f{"F", width_of(args, w1, w2)}, two_f{"2F", 2 * f.size};
  check_recipe(check, args.recipe);
  check.enumerator("tail", args.tail, 2);
  check.groups(groups);
  check.weight("w2", w2, kFloatTypes, num_groups, h, f);
  check.weight("w1", w1, kFloatTypes, num_groups, two_f, h);
  check.gated(args.activation, args.layout, f.size);
  check.ragged("x", x, "row_idx", args.row_idx, groups, h);
  check.same_dtype("x", x, "w1", w1.tensor);
  check.same_dtype("x", x, "w2", w2.tensor);
  check.optional_tensor("b1", args.b1, kFloatTypes, {num_groups, two_f});
  check.optional_tensor("b2", args.b2, kFloatTypes, {num_groups, h});
  check.optional_tensor("probs", args.probs, kFP32Only, {capacity});
  check.optional_tensor("z", args.z, kFloatTypes, {capacity, two_f});
  check.optional_tensor("act", args.act, kFloatTypes, {capacity, f});
  check.tensor("y", args.y, kFloatTypes, {capacity, h});
  for (const NamedTensor& t : {NamedTensor{"z", args.z}, {"act", args.act}, {"y", args.y}}) {
    check.same_dtype(t.name, t.tensor, "x", x);
  }
  if (!check.ok() || purpose == Purpose::kSizeWorkspace) return check.status();
  Footprint()
      .writes("y", args.y)
      .writes("z", args.z)
      .writes("act", args.act)
      .writes(args.workspace)
      .reads("x", x)
      .reads("row_idx", args.row_idx)
      .reads("w1", w1)
      .reads("b1", args.b1)
      .reads("w2", w2)
      .reads("b2", args.b2)
      .reads("probs", args.probs)
      .reads(args.groups)
      .check(check);
  return check.status();
}

struct MlpSteps {
  GroupedGemmGluArgs fc1;
  GroupedGemmArgs fc2;

  template <class Runner>
  Status run(Runner& run) {
    MOIRE_RETURN_IF_ERROR(run(grouped_gemm_glu, grouped_gemm_glu_workspace, fc1));
    return run(grouped_gemm, grouped_gemm_workspace, fc2);
  }
};

MlpSteps steps_of(const GroupedMlpArgs& args, Arena& arena) {
  const TensorView x(args.x);
  TensorView act(args.act);
  if (!act.is_present()) {
    act = arena.take(x.type(), args.groups.capacity, Weight(args.w2).in_features());
  }
  MlpSteps steps;
  GroupedGemmGluArgs& fc1 = steps.fc1;
  fc1.a = x;
  fc1.row_idx = args.row_idx;
  fc1.b = args.w1;
  fc1.bias = args.b1;
  fc1.probs = args.probs;
  fc1.z = args.z;
  fc1.act = act;
  fc1.groups = args.groups;
  fc1.activation = args.activation;
  fc1.layout = args.layout;
  fc1.tail = MOIRE_TAIL_UNTOUCHED;
  GroupedGemmArgs& fc2 = steps.fc2;
  fc2.a = act;
  fc2.b = args.w2;
  fc2.bias = args.b2;
  fc2.bias_scale = TensorView(args.b2).is_present() ? args.probs : moire_tensor{};
  fc2.d = args.y;
  fc2.groups = args.groups;
  fc2.tail = args.tail;
  return steps;
}

}  // namespace

Status grouped_mlp(const Context& context, const GroupedMlpArgs& args) {
  MOIRE_RETURN_IF_ERROR(validate(context, args, Purpose::kRun));
  Arena arena(args.workspace);
  MlpSteps steps = steps_of(args, arena);
  return run_steps("grouped_mlp", context, steps, args.workspace, arena.used());
}

Status grouped_mlp_workspace(const Context& context, const GroupedMlpArgs& args, size_t* bytes) {
  MOIRE_RETURN_IF_ERROR(validate(context, args, Purpose::kSizeWorkspace));
  Arena arena;
  MlpSteps steps = steps_of(args, arena);
  return size_steps(context, steps, arena.used(), bytes);
}

}  // namespace moire
