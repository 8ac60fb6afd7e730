// A case: the library calls that a problem's op makes, on operands, with what the reference says of
// their results. Explain, check and bench run the same cases.
#pragma once

#include <moire/context.h>
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/grouped_mlp.h>
#include <moire/groups.h>
#include <moire/ops.h>
#include <moire/quantize.h>
#include <moire/routing.h>
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

// The library's functions for an argument struct; null where there is no workspace.
template <class A>
struct Entry;
#define MOIRE_ENTRY_OF(name, workspace)                                                       \
  template <>                                                                                 \
  struct Entry<Args<moire_##name##_args>> {                                                   \
    static constexpr const char* kName = #name;                                               \
    static constexpr Status (*kRun)(const Context&, const Args<moire_##name##_args>&) = name; \
    static constexpr Status (*kWorkspace)(const Context&, const Args<moire_##name##_args>&,   \
                                          size_t*) = workspace;                               \
  };
#define MOIRE_ENTRY(name) MOIRE_ENTRY_OF(name, nullptr)
#define MOIRE_ENTRY_WITH_WORKSPACE(name) MOIRE_ENTRY_OF(name, name##_workspace)
MOIRE_FOR_EACH_OP(MOIRE_ENTRY, MOIRE_ENTRY_WITH_WORKSPACE)
#undef MOIRE_ENTRY_WITH_WORKSPACE
#undef MOIRE_ENTRY
#undef MOIRE_ENTRY_OF

// One call of a case with its workspace, on arguments whose results `expect` judges.
template <class A>
Call make_call(const A& args, std::function<Call::Judge(const A&)> expect, double flops = 0) {
  Call call;
  call.entry = Entry<A>::kName;
  const auto with = [args](Workspace given) {
    A filled = args;
    if constexpr (requires { filled.workspace; }) filled.workspace = given;
    return filled;
  };
  call.run = [with](const Context& context, Workspace given) {
    return run_on(context, with(given), Entry<A>::kRun);
  };
  call.stage = [with](staging::StagedCall& staged, Workspace given) { staged.add(with(given)); };
  call.on_device = [with](staging::StagedCall& staged, Workspace given) {
    const A there = staged.on_device(with(given));
    return [there](const Context& context) { return Entry<A>::kRun(context, there); };
  };
  if constexpr (Entry<A>::kWorkspace != nullptr) {
    call.workspace = [args](const Context& context, size_t* bytes) {
      return Entry<A>::kWorkspace(context, args, bytes);
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

// The same where the reference wants no more than the arguments: compare(comparison, args, want).
template <class C, class Want, class Compare>
Call make_call(const Args<C>& args, Want (*reference)(const C&), Compare compare,
               double flops = 0) {
  return make_call<Args<C>>(
      args,
      [reference, compare](const Args<C>& a) {
        return [a, compare, want = reference(a)](Comparison& c) { compare(c, a, want); };
      },
      flops);
}

// The problem's moire_accumulation, and the recipe of its dtype if that is one.
int32_t accumulation_of(const Problem& problem);
int32_t recipe_of(const Problem& problem);

// A struct of arguments, with what every call takes from the problem: groups and tail, activation
// and layout, format and recipe, what is added to.
template <class A>
A args_of(Operands& o) {
  const Problem& p = o.problem();
  const int32_t adds = p.beta == 1 ? 1 : 0;
  A a;
  if constexpr (requires { a.groups; }) a.groups = o.groups();
  if constexpr (requires { a.tail; }) {
    a.tail = p.keep_tail ? MOIRE_TAIL_UNTOUCHED : MOIRE_TAIL_ZERO;
  }
  if constexpr (requires { a.activation; }) a.activation = p.activation;
  if constexpr (requires { a.layout; }) a.layout = p.layout;
  if constexpr (requires { a.accumulation; }) a.accumulation = accumulation_of(p);
  if constexpr (requires { a.scaling; }) a.scaling = p.scaling;
  if constexpr (requires { a.recipe; }) {
    a.recipe = recipe_of(p);
    a.emulate_accumulation = a.recipe != MOIRE_RECIPE_AS_STORED && p.emulated ? 1 : 0;
  }
  if constexpr (requires { a.gradient_dtype; }) {
    if (a.recipe != MOIRE_RECIPE_AS_STORED) a.gradient_dtype = static_cast<int32_t>(p.element);
  }
  if constexpr (requires { a.fractional_scales; }) {
    bool quantizes = p.quantization == Quantization::kFp8Block;
    if constexpr (requires { a.scaling; }) quantizes = true;
    if constexpr (requires { a.recipe; }) quantizes = a.recipe != MOIRE_RECIPE_AS_STORED;
    a.fractional_scales = p.fractional && quantizes ? 1 : 0;
  }
  if constexpr (requires { a.gathered_grad_y; }) a.gathered_grad_y = p.gather ? 1 : 0;
  if constexpr (requires { a.beta; }) a.beta = adds;
  if constexpr (requires { a.beta_per_group; }) a.beta_per_group = o.beta_per_group();
  if constexpr (requires { a.beta_scale; }) a.beta_scale = adds;
  return a;
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
