// A composite op is a few calls of ops that share one workspace: its own pieces (an Arena) in
// front, then scratch that the steps use one after another. The composite lists its steps once, for
// a Runner; one kind of Runner sizes the scratch, the other runs. A step that reads an operand of
// the composite under another name is given the operand's, for findings.
#pragma once

#include <moire/context.h>
#include <moire/tensor.h>

#include <algorithm>
#include <string_view>

#include "core/arena.h"

namespace moire {

// Calls op.workspace(...) of each step and keeps the largest.
class WorkspaceSizer {
 public:
  explicit WorkspaceSizer(const Context& context) : context_(context) {}

  template <class A>
  Status operator()(Status (*)(const Context&, const A&),
                    Status (*workspace)(const Context&, const A&, size_t*), A& args) {
    size_t bytes = 0;
    Status status = workspace(context_, args, &bytes);
    largest_ = std::max(largest_, bytes);
    return status;
  }
  template <class A>
  Status operator()(Status (*)(const Context&, const A&), A&, std::string_view /*operand*/ = {}) {
    return {};
  }
  size_t largest() const { return largest_; }

 private:
  const Context& context_;
  size_t largest_ = 0;
};

// Runs each step with what the arena left of the workspace.
class StepRunner {
 public:
  StepRunner(std::string_view name, const Context& context, Workspace workspace, size_t used)
      : context_(context.within({name, {}})),
        scratch_{workspace.data == nullptr ? nullptr : static_cast<char*>(workspace.data) + used,
                 workspace.bytes - std::min(used, workspace.bytes)} {}

  template <class A>
  Status operator()(Status (*op)(const Context&, const A&),
                    Status (*)(const Context&, const A&, size_t*), A& args) {
    args.workspace = scratch_;
    return op(context_, args);
  }
  template <class A>
  Status operator()(Status (*op)(const Context&, const A&), A& args,
                    std::string_view operand = {}) {
    return operand.empty() ? op(context_, args) : op(context_.within({{}, operand}), args);
  }

 private:
  const Context context_;
  Workspace scratch_;
};

}  // namespace moire
