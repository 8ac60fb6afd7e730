// From a validated call to the implementation that runs it: see that its memory lies apart, walk
// the op's list, take the first that supports the call, check its workspace, run it (or, on an
// explaining context, record what would have run).
#pragma once

#include <moire/context.h>

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "backend/implementation.h"
#include "core/argument_check.h"
#include "core/float_environment.h"
#include "core/footprint.h"
#include "core/status_macros.h"
#include "core/thread_pool.h"

namespace moire {

// What explain says of a call besides its implementation.
struct Cost {
  std::string problem;
  int64_t bytes_read = 0;
};

// Bytes of a view's elements, and of a quantised copy; for cost functions.
inline int64_t bytes_of(const TensorView& t) { return t.num_elements() * dtype_size(t.type()); }
inline int64_t bytes_of(const moire_quantized& q) {
  return bytes_of(TensorView(q.data)) + bytes_of(TensorView(q.scales));
}

// Bytes of the elements that a call writes, by the fields of its struct (moire/fields.h); not those
// of its workspace.
class WrittenBytes : public MemoryVisitor {
 public:
  void field(const char*, const moire_tensor& t, Role role, const char*) {
    if (is_written(role)) count_ += bytes_of(TensorView(t));
  }
  void field(const char*, const moire_weight& w, Role role, const char*) {
    if (is_written(role)) count_ += bytes_of(TensorView(w.tensor));
  }
  void field(const char*, const moire_quantized& q, Role role, const char*) {
    if (is_written(role)) count_ += bytes_of(q);
  }
  void field(const char*, const moire_offsets_output* outputs, Role, int64_t count) {
    for (int64_t i = 0; i < count; ++i) count_ += bytes_of(TensorView(outputs[i].offsets));
  }
  void field(const char*, const uint8_t*, Role, int64_t) {}  // beta_per_group, which is read
  void field(const char*, const moire_groups&) {}
  void field(const char*, const moire_workspace&) {}

  int64_t count() const { return count_; }

 private:
  int64_t count_ = 0;
};

template <class A>
int64_t bytes_written(const A& args) {
  WrittenBytes bytes;
  visit_fields(args, bytes);
  return bytes.count();
}

// A call's workspace: an empty one, where its struct has none.
template <class A>
Workspace workspace_of(const A& args) {
  if constexpr (requires { args.workspace; }) return args.workspace;
  return {};
}

template <class A>
struct Choice {
  const Implementation<A>* implementation = nullptr;
  std::vector<Refusal> refused;  // faster ones on this device
};

inline std::string reasons(const std::vector<Refusal>& refused) {
  std::string text;
  for (const Refusal& r : refused) text += concat("; ", r.implementation, ": ", r.reason);
  return text;
}

// Whether a forced name rules a candidate out. The only implementation of an op for CUDA, `cuda`,
// is no choice: it runs under every name, so that a layer whose GEMMs are forced runs to its end.
inline bool is_ruled_out(std::string_view forced, std::string_view candidate) {
  return !forced.empty() && forced != candidate && candidate != "cuda";
}

template <class A>
Result<Choice<A>> choose(const Context& context, std::string_view op, const A& args) {
  const std::string& forced = context.options().implementation;
  Choice<A> choice;
  for (const Implementation<A>& candidate : implementations<A>()) {
    if (candidate.device != context.device()) continue;
    Reason reason = is_ruled_out(forced, candidate.name)
                        ? Reason(concat("the context asks for \"", forced, "\""))
                        : candidate.supports(context.state(), args);
    if (!reason.has_value()) {
      choice.implementation = &candidate;
      break;
    }
    choice.refused.push_back({std::string(candidate.name), *std::move(reason)});
  }
  if (choice.implementation == nullptr) {
    return Status(Code::kUnsupported,
                  concat(op, ": no implementation on ", device_name(context.device()),
                         " takes this call", reasons(choice.refused)));
  }
  if (context.options().strict && forced.empty() && !choice.refused.empty()) {
    return Status(Code::kUnsupported,
                  concat(op, ": strict, but the fastest implementation was refused",
                         reasons(choice.refused)));
  }
  return choice;
}

template <class A>
Status size_workspace(const Context& context, std::string_view op, const A& args, size_t* bytes) {
  if (bytes == nullptr) {
    return {Code::kInvalidArgument, concat(op, "_workspace: bytes is null, needs an address")};
  }
  const Result<Choice<A>> choice = choose(context, op, args);
  if (!choice.ok()) return choice.status();
  const size_t needed = choice.value().implementation->workspace(context.state(), args);
  MOIRE_RETURN_IF_ERROR(check_workspace_size(op, needed));
  *bytes = needed;
  return {};
}

// Runs a call that has been checked. Threads that are lent to the context and never come end it.
template <class A>
Status run_chosen(const Context& context, std::string_view op,
                  const Implementation<A>& implementation, const A& args) {
  const FloatEnvironment exact;
  try {
    return implementation.run(context, args);
  } catch (const NoThreadsLent&) {
    return {Code::kInvalidArgument,
            concat(op,
                   ": the context's `parallel` returned without a call of its body, needs at "
                   "least one; what the outputs hold is not defined")};
  }
}

// Where the outputs have no elements, nothing runs, however many rows there are; but
// splits_to_offsets is also asked whether the splits are sound. `describe` returns the Cost; it is
// called only when somebody wants to know.
template <class A, class Describe>
Status dispatch(const Context& context, std::string_view op, const A& args, Describe&& describe) {
  ArgumentCheck check(op, context, ArgumentCheck::Purpose::kRun);
  if (!check_memory(check, args)) return check.status();
  Result<Choice<A>> choice = choose(context, op, args);
  if (!choice.ok()) return choice.status();
  const Implementation<A>& chosen = *choice.value().implementation;
  const size_t needed = chosen.workspace(context.state(), args);
  if (!check.workspace(workspace_of(args), needed)) return check.status();
  if (context.state().is_planned && !context.is_explaining()) {
    return {Code::kUnsupported,
            concat(op, ": the context plans for ", context.state().name,
                   ", on which nothing runs; needs an explaining context, or a device")};
  }
  if (context.is_explaining()) {
    Cost cost = describe();
    context.record(
        {.op = std::string(op),
         .problem = std::move(cost.problem),
         .implementation = std::string(chosen.name),
         .policy = chosen.policy(context.state(), args),
         .launches = chosen.launches == nullptr ? 1 : chosen.launches(context.state(), args),
         .bytes_read = cost.bytes_read,
         .bytes_written = bytes_written(args),
         .workspace_bytes = static_cast<int64_t>(needed),
         .refused = std::move(choice.value().refused)});
    return {};
  }
  if (bytes_written(args) == 0 && !std::is_same_v<A, SplitsToOffsetsArgs>) return {};
  return run_chosen(context, op, chosen, args);
}

}  // namespace moire
