// A composite op is a few calls of ops that share one workspace: its own pieces (an Arena) in
// front, then scratch that the steps use one after another. The composite says its steps once, in
// a function that is called twice: to measure the pieces and the largest scratch, and to run.
#pragma once

#include <moire/context.h>
#include <moire/tensor.h>

#include <algorithm>
#include <string_view>

#include "core/arena.h"
#include "core/argument_check.h"
#include "core/footprint.h"
#include "core/status_macros.h"

namespace moire {

class Steps {
 public:
  // Measures: no step runs, and every piece of the arena is null.
  explicit Steps(const Context& context) : context_(context), is_measuring_(true) {}
  // Runs the composite of this name, whose pieces and scratch have been measured.
  Steps(std::string_view name, const Context& context, Workspace workspace, const Steps& measured)
      : arena(workspace), context_(context.within({name, {}})), answers_(measured.answers_) {
    Arena pieces(workspace);
    pieces.take(static_cast<int64_t>(measured.arena.used()));
    scratch_ = pieces.rest();
  }

  // One step, unless an earlier one has failed. An operand of the composite that the step reads
  // under another name is given its own, for findings.
  template <class A>
  void run(Status (*op)(const Context&, const A&), const A& args, std::string_view operand = {}) {
    if (is_measuring_ || !status_.ok()) return;
    status_ = operand.empty() ? op(context_, args) : op(context_.within({{}, operand}), args);
  }
  template <class A>
  void run(Status (*op)(const Context&, const A&),
           Status (*workspace)(const Context&, const A&, size_t*), A args,
           std::string_view operand = {}) {
    if (!is_measuring_) {
      args.workspace = scratch_;
      return run(op, args, operand);
    }
    size_t bytes = 0;
    if (status_.ok()) status_ = workspace(context_, args, &bytes);
    largest_ = std::max(largest_, bytes);
  }

  // Whether the device takes such a call: asked while measuring, 32 times at most.
  template <class A>
  bool takes(Status (*workspace)(const Context&, const A&, size_t*), const A& args) {
    const uint32_t answer = 1U << num_asked_++;
    size_t bytes = 0;
    if (is_measuring_ && workspace(context_, args, &bytes).ok()) answers_ |= answer;
    return (answers_ & answer) != 0;
  }

  const Status& status() const { return status_; }
  const Context& context() const { return context_; }
  bool on_cpu() const { return context_.device() == Device::kCpu; }
  // Of the pieces and the largest scratch, once measured.
  size_t bytes() const { return arena.used() + largest_; }

  Arena arena;

 private:
  const Context context_;
  const bool is_measuring_ = false;
  Workspace scratch_ = {};
  size_t largest_ = 0;
  uint32_t answers_ = 0, num_asked_ = 0;  // of takes()
  Status status_;
};

// A composite: how its arguments are checked, and what its steps are.
template <class A>
struct Composite {
  std::string_view name;
  void (*validate)(ArgumentCheck&, const A&);
  void (*run_steps)(Steps&, const A&);

  Status size_workspace(const Context& context, const A& args, size_t* bytes) const {
    MOIRE_RETURN_IF_ERROR(
        check_call(name, context, ArgumentCheck::Purpose::kSizeWorkspace, validate, args).status());
    Steps steps(context);
    run_steps(steps, args);
    MOIRE_RETURN_IF_ERROR(steps.status());
    return give_workspace_size(name, steps.bytes(), bytes);
  }

  // The workspace is checked before the first step runs, so that one too small for the last leaves
  // every output as it was.
  Status run(const Context& context, const A& args) const {
    ArgumentCheck check = check_call(name, context, ArgumentCheck::Purpose::kRun, validate, args);
    if (!check.ok()) return check.status();
    Steps measured(context);
    run_steps(measured, args);
    MOIRE_RETURN_IF_ERROR(measured.status());
    MOIRE_RETURN_IF_ERROR(check_workspace_size(name, measured.bytes()));
    if (!check.workspace(args.workspace, measured.bytes())) return check.status();
    Steps steps(name, context, args.workspace, measured);
    run_steps(steps, args);
    return steps.status();
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
