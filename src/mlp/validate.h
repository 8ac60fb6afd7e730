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

// A composite: how its arguments are checked, and what its steps are, with their own pieces of the
// workspace taken from an arena.
template <class A, class Steps>
struct Composite {
  std::string_view name;
  void (*validate)(ArgumentCheck&, const A&);
  Steps (*steps_of)(const Context&, const A&, Arena&);

  Status size_workspace(const Context& context, const A& args, size_t* bytes) const {
    ArgumentCheck check(name, context, ArgumentCheck::Purpose::kSizeWorkspace);
    validate(check, args);
    if (!check_outputs(check, args)) return check.status();
    if (bytes == nullptr) {
      return {Code::kInvalidArgument, concat(name, "_workspace: bytes is null, needs an address")};
    }
    Arena arena;
    Steps steps = steps_of(context, args, arena);
    return size(context, steps, arena, bytes);
  }

  // The workspace is checked before the first step runs, so that one too small for the last leaves
  // every output as it was.
  Status run(const Context& context, const A& args) const {
    ArgumentCheck check(name, context, ArgumentCheck::Purpose::kRun);
    validate(check, args);
    if (!check_outputs(check, args) || !check_memory(check, args)) return check.status();
    Arena arena(args.workspace);
    Steps steps = steps_of(context, args, arena);
    size_t needed = 0;
    MOIRE_RETURN_IF_ERROR(size(context, steps, arena, &needed));
    if (!check.workspace(args.workspace, needed)) return check.status();
    StepRunner runner(name, context, args.workspace, arena.used());
    return steps.run(runner);
  }

 private:
  // The arena's pieces, and the largest scratch of the steps.
  Status size(const Context& context, Steps& steps, const Arena& arena, size_t* bytes) const {
    WorkspaceSizer sizer(context);
    MOIRE_RETURN_IF_ERROR(steps.run(sizer));
    const size_t needed = arena.used() + sizer.largest();
    MOIRE_RETURN_IF_ERROR(check_workspace_size(name, needed));
    *bytes = needed;
    return {};
  }
};

}  // namespace moire

// The entry of a composite and the twin that sizes its scratch; validate() and steps_of() of its
// struct come before them.
#define MOIRE_DEFINE_COMPOSITE(name, Steps)                                                       \
  static constexpr Composite<Args<moire_##name##_args>, Steps> kComposite_##name{#name, validate, \
                                                                                 steps_of};       \
  Status name(const Context& context, const Args<moire_##name##_args>& args) {                    \
    return kComposite_##name.run(context, args);                                                  \
  }                                                                                               \
  Status name##_workspace(const Context& context, const Args<moire_##name##_args>& args,          \
                          size_t* bytes) {                                                        \
    return kComposite_##name.size_workspace(context, args, bytes);                                \
  }
