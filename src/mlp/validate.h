// Checks that grouped_linear and grouped_mlp share, whatever the recipe, and how their steps run.
#pragma once

#include <moire/grouped_mlp.h>

#include <string_view>

#include "core/arena.h"
#include "core/argument_check.h"
#include "core/footprint.h"
#include "core/status_macros.h"
#include "mlp/steps.h"

namespace moire {

// The size that three operands should share (0: one that is absent), so that a message blames the
// odd one out; where all differ, the first is believed.
inline int64_t agreed_size(int64_t first, int64_t second, int64_t third) {
  return second == third && second != 0 ? second : first;
}

// A composite: how its arguments are checked, and what its steps are.
template <class A>
struct Composite {
  std::string_view name;
  void (*validate)(ArgumentCheck&, const A&);
  void (*run_steps)(Steps&, const A&);

  Status size_workspace(const Context& context, const A& args, size_t* bytes) const {
    ArgumentCheck check(name, context, ArgumentCheck::Purpose::kSizeWorkspace);
    validate(check, args);
    if (!check_outputs(check, args)) return check.status();
    if (bytes == nullptr) {
      return {Code::kInvalidArgument, concat(name, "_workspace: bytes is null, needs an address")};
    }
    Steps steps(context);
    MOIRE_RETURN_IF_ERROR(measure(steps, args));
    *bytes = steps.bytes();
    return {};
  }

  // The workspace is checked before the first step runs, so that one too small for the last leaves
  // every output as it was.
  Status run(const Context& context, const A& args) const {
    ArgumentCheck check(name, context, ArgumentCheck::Purpose::kRun);
    validate(check, args);
    if (!check_outputs(check, args) || !check_memory(check, args)) return check.status();
    Steps measured(context);
    MOIRE_RETURN_IF_ERROR(measure(measured, args));
    if (!check.workspace(args.workspace, measured.bytes())) return check.status();
    Steps steps(name, context, args.workspace, measured);
    run_steps(steps, args);
    return steps.status();
  }

 private:
  Status measure(Steps& steps, const A& args) const {
    run_steps(steps, args);
    MOIRE_RETURN_IF_ERROR(steps.status());
    return check_workspace_size(name, steps.bytes());
  }
};

}  // namespace moire

// The entry of a composite and the twin that sizes its scratch; validate() and run_steps() of its
// struct come before them.
#define MOIRE_DEFINE_COMPOSITE(name)                                                       \
  static constexpr Composite<Args<moire_##name##_args>> kComposite_##name{#name, validate, \
                                                                          run_steps};      \
  Status name(const Context& context, const Args<moire_##name##_args>& args) {             \
    return kComposite_##name.run(context, args);                                           \
  }                                                                                        \
  Status name##_workspace(const Context& context, const Args<moire_##name##_args>& args,   \
                          size_t* bytes) {                                                 \
    return kComposite_##name.size_workspace(context, args, bytes);                         \
  }
