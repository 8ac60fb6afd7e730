// Validation and dispatch of glu and glu_backward.
#include <moire/glu.h>

#include "core/resolved_groups.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

struct Sizes {
  int64_t rows, f;
};

// z [capacity, 2F] gives the sizes; everything that both directions share.
Sizes check_shared(ArgumentCheck& check, const TensorView& z, const TensorView& probs,
                   const Groups& groups, const moire_activation& activation,
                   const moire_glu_layout& layout, int32_t tail) {
  if (!check.ranked("z", z, kFloatTypes, 2)) return {};
  check.require(z.columns() % 2 == 0, "z is ", z,
                ", needs an even number of columns (gate and up)");
  const Sizes sizes{z.num_rows(), z.columns() / 2};
  check.gated(activation, layout, sizes.f);
  check.enumerator("tail", tail, 2);
  check.optional_tensor("probs", probs, kFP32Only, {{"capacity", sizes.rows}});
  if (!check.ok() || is_absent(groups)) return sizes;  // every row is in use
  check.require(groups.capacity == sizes.rows, "groups.capacity is ", groups.capacity, " but z is ",
                z);
  check.groups(groups);
  return sizes;
}

std::string_view activation_name(const moire_activation& activation) {
  switch (activation.kind) {
    case MOIRE_CLAMPED_SWIGLU:
      return "clamped swiglu";
    case MOIRE_GEGLU_TANH:
      return "geglu tanh";
    default:
      return "swiglu";
  }
}

template <class A>
std::string problem_of(const A& args) {
  const moire_glu_layout& layout = args.layout;
  const std::string block = layout.block == 0 ? "halves" : concat("blocks of ", layout.block);
  return concat(activation_name(args.activation), " of ", TensorView(args.z), " in ", block,
                layout.order == MOIRE_GATE_FIRST ? ", gate first" : ", up first");
}

void validate(ArgumentCheck& check, const GluArgs& args) {
  const TensorView z(args.z), probs(args.probs), act(args.act);
  const Sizes s =
      check_shared(check, z, probs, args.groups, args.activation, args.layout, args.tail);
  if (!check.ok()) return;
  check.tensor("act", act, kFloatTypes, {{"capacity", s.rows}, {"F", s.f}});
  check.same_dtype("z", z, "act", act);
}

void validate(ArgumentCheck& check, const GluBackwardArgs& args) {
  const TensorView z(args.z), probs(args.probs);
  const Sizes s =
      check_shared(check, z, probs, args.groups, args.activation, args.layout, args.tail);
  if (!check.ok()) return;
  const NamedTensor grad_act{"grad_act", args.grad_act}, grad_z{"grad_z", args.grad_z},
      act{"act", args.act}, grad_probs{"grad_probs", args.grad_probs};
  check.tensor(grad_act.name, grad_act.tensor, kFloatTypes, {{"capacity", s.rows}, {"F", s.f}});
  check.tensor(grad_z.name, grad_z.tensor, kFloatTypes, {{"capacity", s.rows}, {"2F", 2 * s.f}});
  check.optional_tensor(act.name, act.tensor, kFloatTypes, {{"capacity", s.rows}, {"F", s.f}});
  check.optional_tensor(grad_probs.name, grad_probs.tensor, kFP32Only, {{"capacity", s.rows}});
  for (const NamedTensor& other : {grad_act, grad_z, act}) {
    check.same_dtype("z", z, other.name, other.tensor);
  }
}

}  // namespace

MOIRE_DEFINE_OP(glu)
MOIRE_DEFINE_OP(glu_backward)

}  // namespace moire
