// A case: the library calls that a problem's op makes, on operands, with what the reference says of
// their results. Explain, check and bench run the same cases.
#pragma once

#include <moire/context.h>
#include <moire/grouped_mlp.h>
#include <moire/tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "comparison.h"
#include "operands.h"
#include "sample.h"
#include "staging/staged_call.h"

namespace moire::tool {

struct Call {
  std::string entry;  // "grouped_gemm"
  // Null where the entry takes no workspace.
  std::function<Status(const Context&, size_t*)> workspace;
  std::function<Status(const Context&, Workspace)> run;
  // For operands that stay on a device: names them, and once they are uploaded makes the call on
  // them, which only enqueues.
  std::function<void(staging::StagedCall&, Workspace)> stage;
  std::function<std::function<Status(const Context&)>(staging::StagedCall&, Workspace)> on_device;
  // Asked before the call, because accumulating outputs are inputs too; what it returns judges
  // after.
  using Judge = std::function<void(Comparison&)>;
  std::function<Judge()> expect;
  // The same of one row only, at the full width; null where rows do not stand for themselves.
  std::function<Judge(int64_t row, int64_t group)> expect_row;
  double flops = 0;  // of the rows in use
  // Bytes kept for a later call, beside tensors that the caller has anyway.
  struct Saved {
    const char* name;
    int64_t bytes;
  };
  std::vector<Saved> saved;
};

struct Case {
  std::vector<Call> calls;
};

// The operands outlive the case.
Case make_case(Operands& operands);

// UsageError where the operands and workspaces of a problem's case are more than the free memory;
// takes none to find out.
void require_memory_for(const Context& context, const Problem& problem);

// Runs a call on operands of the host's memory, whatever the context's device.
template <class A>
Status run_on(const Context& context, const A& args, Status (*run)(const Context&, const A&)) {
  if (context.device() == Device::kCpu || context.is_explaining()) return run(context, args);
  static staging::StagedCall staged;
  return staged.run(context, args, run);
}

// One call of a case with its workspace; null functions and no workspace where an entry has none.
template <class A>
Call make_call(std::string entry, const A& args, Status (*run)(const Context&, const A&),
               Status (*workspace)(const Context&, const A&, size_t*),
               std::function<Call::Judge(const A&)> expect, double flops) {
  Call call;
  call.entry = std::move(entry);
  const auto with = [args](Workspace given) {
    A filled = args;
    if constexpr (requires { filled.workspace; }) filled.workspace = given;
    return filled;
  };
  call.run = [with, run](const Context& context, Workspace given) {
    return run_on(context, with(given), run);
  };
  call.stage = [with](staging::StagedCall& staged, Workspace given) { staged.add(with(given)); };
  call.on_device = [with, run](staging::StagedCall& staged, Workspace given) {
    const A there = staged.on_device(with(given));
    return [there, run](const Context& context) { return run(context, there); };
  };
  if (workspace != nullptr) {
    call.workspace = [args, workspace](const Context& context, size_t* bytes) {
      return workspace(context, args, bytes);
    };
  }
  if constexpr (requires { one_row(args, 0, 0); }) {
    call.expect_row = [args, expect](int64_t row, int64_t group) {
      const Sample<A> sample = one_row(args, row, group);
      return expect(sample.args);
    };
  }
  call.expect = [args, expect = std::move(expect)] { return expect(args); };
  call.flops = flops;
  return call;
}

// The two calls of a whole grouped MLP, for whoever judges it in another way.
struct MlpArgs {
  GroupedMlpArgs forward;
  GroupedMlpBackwardArgs backward;
};
MlpArgs make_mlp_args(Operands& operands);

// Of each kind of op; cases_*.cpp.
Case make_gemm_case(Operands& operands);
Case make_glu_case(Operands& operands);
Case make_quantize_case(Operands& operands);
Case make_layer_case(Operands& operands);
Case make_routing_case(Operands& operands);

}  // namespace moire::tool
