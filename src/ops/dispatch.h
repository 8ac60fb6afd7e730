// From a call to the implementation that runs it: check its arguments, see that its memory lies
// apart, walk the op's list, take the first that supports the call, check its workspace, run it
// (or, on an explaining context, record what would have run). Main path: Op::run.
#pragma once

#include <moire/context.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/implementation.h"
#include "core/argument_check.h"
#include "core/float_environment.h"
#include "core/footprint.h"
#include "core/status_macros.h"
#include "core/thread_pool.h"
#include "ops/traffic.h"

namespace moire {

template <class A>
struct Selection {
  const Implementation<A>* implementation = nullptr;
  std::vector<Refusal> refused;  // faster ones on this device
};

inline std::string reasons(const std::vector<Refusal>& refused) {
  std::string text;
  for (const Refusal& r : refused) text += concat("; ", r.implementation, ": ", r.reason);
  return text;
}

// Whether a forced name rules a candidate out. The only implementation of an op for CUDA, `cuda`,
// is never ruled out: it runs under every name, so that a layer whose GEMMs are forced runs to its
// end.
inline bool is_ruled_out(std::string_view forced, std::string_view candidate) {
  return !forced.empty() && forced != candidate && candidate != "cuda";
}

template <class A>
Result<Selection<A>> select(const Context& context, std::string_view op, const A& args) {
  const std::string& forced = context.options().implementation;
  Selection<A> selection;
  for (const Implementation<A>& candidate : implementations<A>()) {
    if (candidate.device != context.device()) continue;
    Reason reason = is_ruled_out(forced, candidate.name)
                        ? Reason(concat("the context asks for \"", forced, "\""))
                        : candidate.supports(context.state(), args);
    if (!reason.has_value()) {
      selection.implementation = &candidate;
      break;
    }
    selection.refused.push_back({std::string(candidate.name), *std::move(reason)});
  }
  if (selection.implementation == nullptr) {
    return Status(Code::kUnsupported,
                  concat(op, ": no implementation on ", device_name(context.device()),
                         " takes this call", reasons(selection.refused)));
  }
  if (context.options().strict && forced.empty() && !selection.refused.empty()) {
    return Status(Code::kUnsupported,
                  concat(op, ": strict, but the fastest implementation was refused",
                         reasons(selection.refused)));
  }
  return selection;
}

int64_t bytes_read(const auto& args) { return traffic_of(args).read(); }

// An op: how its arguments are checked, and what explain says of them, which is asked for only when
// somebody wants to know.
template <class A>
struct Op {
  std::string_view name;
  void (*validate)(ArgumentCheck& check, const A& args);
  std::string (*problem_of)(const A& args);
  int64_t (*bytes_read_of)(const A& args) = bytes_read<A>;

  Status run(const Context& context, const A& args) const {
    ArgumentCheck check = check_call(name, context, ArgumentCheck::Purpose::kRun, validate, args);
    if (!check.ok()) return check.status();
    Result<Selection<A>> selection = select(context, name, args);
    if (!selection.ok()) return selection.status();
    const Implementation<A>& selected = *selection.value().implementation;
    const size_t needed = selected.workspace(context.state(), args);
    Workspace given{};  // empty, where the struct has none
    if constexpr (requires { args.workspace; }) given = args.workspace;
    if (!check.workspace(given, needed)) return check.status();
    if (context.is_explaining()) {
      context.record(step_of(context, args, selection.value(), needed));
      return {};
    }
    if (context.state().is_planned) {
      return {Code::kUnsupported,
              concat(name, ": the context plans for ", context.state().name,
                     ", on which nothing runs; needs an explaining context, or a device")};
    }
    // Outputs without elements need no run, however many rows there are.
    if (!selected.always_runs && traffic_of(args).written() == 0) return {};
    const FloatEnvironment exact;
    try {
      return selected.run(context, args);
    } catch (const NoThreadsLent&) {
      return invalid(name,
                     "the context's `parallel` returned without a call of its body, needs at least "
                     "one; what the outputs hold is not defined");
    }
  }

  Status size_workspace(const Context& context, const A& args, size_t* bytes) const {
    MOIRE_RETURN_IF_ERROR(
        check_call(name, context, ArgumentCheck::Purpose::kSizeWorkspace, validate, args).status());
    const Result<Selection<A>> selection = select(context, name, args);
    if (!selection.ok()) return selection.status();
    const Implementation<A>& selected = *selection.value().implementation;
    return give_workspace_size(name, selected.workspace(context.state(), args), bytes);
  }

 private:
  Step step_of(const Context& context, const A& args, Selection<A>& selection,
               size_t needed) const {
    const Implementation<A>& selected = *selection.implementation;
    const DeviceState& state = context.state();
    return {.op = std::string(name),
            .problem = problem_of(args),
            .implementation = std::string(selected.name),
            .policy = selected.policy(state, args),
            .launches = selected.launches == nullptr ? 1 : selected.launches(state, args),
            .bytes_read = bytes_read_of(args),
            .bytes_written = traffic_of(args).written(),
            .workspace_bytes = static_cast<int64_t>(needed),
            .refused = std::move(selection.refused)};
  }
};

}  // namespace moire

// The entry of an op and, where it takes scratch, the twin that sizes it. They find validate() and
// problem_of() of the op's struct before them; reading other bytes than its fields say, they are
// given a function that counts those.
#define MOIRE_DEFINE_OP(name, ...)                                             \
  static constexpr Op<Args<moire_##name##_args>> kOp_##name{                   \
      #name, validate, problem_of __VA_OPT__(, ) __VA_ARGS__};                 \
  Status name(const Context& context, const Args<moire_##name##_args>& args) { \
    return kOp_##name.run(context, args);                                      \
  }
#define MOIRE_DEFINE_OP_WITH_WORKSPACE(name, ...)                                        \
  MOIRE_DEFINE_OP(name, __VA_ARGS__)                                                     \
  Status name##_workspace(const Context& context, const Args<moire_##name##_args>& args, \
                          size_t* bytes) {                                               \
    return kOp_##name.size_workspace(context, args, bytes);                              \
  }
