// Validation and dispatch of glu and glu_backward.
#include <moire/glu.h>

#include "ops/dispatch.h"
#include "ops/glu_check.h"

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
  check.require(z.columns() % 2 == 0, "z is ", to_string(z),
                ", needs an even number of columns (gate and up)");
  const Sizes sizes{z.num_rows(), z.columns() / 2};
  check_activation(check, activation);
  check_glu_layout(check, "layout", layout, sizes.f);
  check.enumerator("tail", tail, 2);
  check.optional_tensor("probs", probs, kFP32Only, {{"capacity", sizes.rows}});
  if (!check.ok() || groups_are_absent(groups)) return sizes;
  check.require(groups.capacity == sizes.rows, "groups.capacity is ", groups.capacity, " but z is ",
                to_string(z));
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

std::string problem_of(const TensorView& z, const moire_activation& activation,
                       const moire_glu_layout& layout) {
  const std::string block = layout.block == 0 ? "halves" : concat("blocks of ", layout.block);
  return concat(activation_name(activation), " of ", to_string(z), " in ", block,
                layout.order == MOIRE_GATE_FIRST ? ", gate first" : ", up first");
}

Status check_glu(const Context& context, const GluArgs& args) {
  ArgumentCheck check("glu", context, ArgumentCheck::Purpose::kRun);
  const TensorView z(args.z), probs(args.probs), act(args.act);
  const Sizes s =
      check_shared(check, z, probs, args.groups, args.activation, args.layout, args.tail);
  if (!check.ok()) return check.status();
  check.tensor("act", act, kFloatTypes, {{"capacity", s.rows}, {"F", s.f}});
  check.same_dtype("z", z, "act", act);
  check.disjoint("act", act, "z", z);
  check.disjoint("act", act, "probs", probs);
  return check.status();
}

Status check_glu_backward(const Context& context, const GluBackwardArgs& args) {
  ArgumentCheck check("glu_backward", context, ArgumentCheck::Purpose::kRun);
  const TensorView z(args.z), probs(args.probs);
  const Sizes s =
      check_shared(check, z, probs, args.groups, args.activation, args.layout, args.tail);
  if (!check.ok()) return check.status();
  struct Named {
    std::string_view name;
    TensorView view;
  };
  const Named grad_act{"grad_act", args.grad_act}, grad_z{"grad_z", args.grad_z},
      act{"act", args.act}, grad_probs{"grad_probs", args.grad_probs};
  check.tensor(grad_act.name, grad_act.view, kFloatTypes, {{"capacity", s.rows}, {"F", s.f}});
  check.tensor(grad_z.name, grad_z.view, kFloatTypes, {{"capacity", s.rows}, {"2F", 2 * s.f}});
  check.optional_tensor(act.name, act.view, kFloatTypes, {{"capacity", s.rows}, {"F", s.f}});
  check.optional_tensor(grad_probs.name, grad_probs.view, kFP32Only, {{"capacity", s.rows}});
  for (const Named& other : {grad_act, grad_z, act}) {
    check.same_dtype("z", z, other.name, other.view);
  }
  const Named inputs[] = {{"z", z}, {"probs", probs}, grad_act};
  const Named outputs[] = {grad_z, act, grad_probs};
  for (size_t i = 0; i < std::size(outputs); ++i) {
    for (const Named& input : inputs) {
      check.disjoint(outputs[i].name, outputs[i].view, input.name, input.view);
    }
    for (size_t j = 0; j < i; ++j) {
      check.disjoint(outputs[i].name, outputs[i].view, outputs[j].name, outputs[j].view);
    }
  }
  return check.status();
}

}  // namespace

Status glu(const Context& context, const GluArgs& args) {
  MOIRE_RETURN_IF_ERROR(check_glu(context, args));
  return dispatch(context, "glu", args, Workspace{}, [&] {
    return Cost{problem_of(args.z, args.activation, args.layout),
                bytes_of(args.z) + bytes_of(args.probs), bytes_of(args.act)};
  });
}

Status glu_backward(const Context& context, const GluBackwardArgs& args) {
  MOIRE_RETURN_IF_ERROR(check_glu_backward(context, args));
  return dispatch(context, "glu_backward", args, Workspace{}, [&] {
    return Cost{problem_of(args.z, args.activation, args.layout),
                bytes_of(args.z) + bytes_of(args.probs) + bytes_of(args.grad_act),
                bytes_of(args.grad_z) + bytes_of(args.act) + bytes_of(args.grad_probs)};
  });
}

}  // namespace moire
