// CUDA's implementations: of the grouped GEMMs sm90 (Hopper's tensor cores, BF16) and portable (any
// GPU since sm_80), of every other op one, `cuda`.
#pragma once

#include "backend/implementation.h"
#include "core/arena.h"

namespace moire::cuda {

// Kernels that a call launches.
int64_t launches_of(const auto& implementation, const DeviceState& state, const auto& args) {
  return implementation.launches == nullptr ? 1 : implementation.launches(state, args);
}

// An implementation of which one object answers every question: Call(state, args, workspace) plans
// a call, over no workspace where nothing is run.
template <class A, class Call>
constexpr Implementation<A> implementation_of(std::string_view name) {
  return {name,
          Device::kCuda,
          [](const DeviceState& state, const A& args) { return Call(state, args, {}).supports(); },
          [](const DeviceState& state, const A& args) { return Call(state, args, {}).workspace(); },
          [](const DeviceState& state, const A& args) { return Call(state, args, {}).policy(); },
          [](const Context& context, const A& args) {
            return Call(context.state(), args, args.workspace).run(context);
          },
          [](const DeviceState& state, const A& args) { return Call(state, args, {}).launches(); }};
}

// A call as such an object plans it; ops derive from it and add what it runs.
template <class A>
struct PlannedCall {
  PlannedCall(const DeviceState& device, const A& given, const Workspace& workspace)
      : state(device), args(given), arena(workspace) {}

  size_t workspace() const { return arena.used(); }

  const DeviceState& state;
  const A& args;
  Arena arena;
};

// An implementation of functions, which needs no workspace.
template <class A>
constexpr Implementation<A> on_cuda(decltype(Implementation<A>::supports) supports,
                                    decltype(Implementation<A>::policy) policy,
                                    Status (*run)(const Context& context, const A& args),
                                    decltype(Implementation<A>::launches) launches = nullptr) {
  return {"cuda", Device::kCuda, supports, no_workspace, policy, run, launches};
}

// A product, which also runs as a step of the op that `op`, a literal, names.
struct Product : Implementation<GroupedGemmArgs> {
  Status (*run_as)(const Context& context, const char* op, const GroupedGemmArgs& args);
};
template <class Call>
constexpr Product product_of(std::string_view name) {
  return {implementation_of<GroupedGemmArgs, Call>(name),
          [](const Context& context, const char* op, const GroupedGemmArgs& args) {
            return Call(context.state(), args, args.workspace).run(context, op);
          }};
}

namespace sm90 {

extern const Product kGroupedGemm;
extern const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu;
extern const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward;
extern const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad;

}  // namespace sm90

// On FP8 tensor cores, which with_fp8.cpp puts before the others.
namespace sm90::scaled {

extern const Product kGroupedGemm;
extern const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad;

}  // namespace sm90::scaled

// Of weights that are decoded inside the kernel.
namespace sm90::decoding {

extern const Product kGroupedGemm;

}  // namespace sm90::decoding

namespace portable {

extern const Product kGroupedGemm;
extern const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu;
extern const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward;
extern const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad;

}  // namespace portable

// With the FP8 operands and outputs that the kernels above leave to others (with_fp8.cpp).
namespace sm90::with_fp8 {

MOIRE_FOR_EACH_GEMM(MOIRE_DECLARE_IMPLEMENTATION)

}  // namespace sm90::with_fp8

namespace portable::with_fp8 {

MOIRE_FOR_EACH_GEMM(MOIRE_DECLARE_IMPLEMENTATION)

}  // namespace portable::with_fp8

namespace ops {

MOIRE_FOR_EACH_OTHER_OP(MOIRE_DECLARE_IMPLEMENTATION)
WeightForm prepared_form(const DeviceState& state, const PrepareWeightArgs& args);

}  // namespace ops

}  // namespace moire::cuda
