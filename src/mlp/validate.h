// Checks that grouped_linear and grouped_mlp share, whatever the recipe, and how their steps run.
#pragma once

#include <moire/grouped_mlp.h>

#include <string_view>

#include "core/argument_check.h"
#include "core/status_macros.h"
#include "mlp/steps.h"

namespace moire {

// The size that three operands should share (0: one that is absent), so that a message blames the
// odd one out; where all differ, the first is believed.
inline int64_t agreed_size(int64_t first, int64_t second, int64_t third) {
  return second == third && second != 0 ? second : first;
}

// Whether gradients are accumulated: 0 or 1, for all groups or for each.
inline void check_beta(ArgumentCheck& check, std::string_view name, int32_t beta,
                       const uint8_t* per_group, const Groups& groups) {
  check.enumerator(name, beta, 2);
  if (per_group == nullptr || !check.ok() || !check.reads_values()) return;
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    if (per_group[g] > 1) {
      check.require(false, name, "_per_group[", g, "] is ", per_group[g], ", must be 0 or 1");
      return;
    }
  }
}

// Scratch of a composite: `arena_bytes` of its own and the largest of its steps'.
template <class Steps>
Status size_steps(std::string_view op, const Context& context, Steps& steps, size_t arena_bytes,
                  size_t* bytes) {
  if (bytes == nullptr) {
    return {Code::kInvalidArgument, concat(op, "_workspace: bytes is null, needs an address")};
  }
  WorkspaceSizer sizer(context);
  MOIRE_RETURN_IF_ERROR(steps.run(sizer));
  *bytes = arena_bytes + sizer.largest();
  return {};
}

// Checked before the first step runs, so that a workspace too small for the last one leaves every
// output as it was.
template <class Steps>
Status run_steps(std::string_view op, const Context& context, Steps& steps, Workspace workspace,
                 size_t arena_bytes) {
  size_t needed = 0;
  MOIRE_RETURN_IF_ERROR(size_steps(op, context, steps, arena_bytes, &needed));
  ArgumentCheck check(op, context, ArgumentCheck::Purpose::kRun);
  if (!check.workspace(workspace, needed)) return check.status();
  StepRunner runner(context, workspace, arena_bytes);
  return steps.run(runner);
}

}  // namespace moire
