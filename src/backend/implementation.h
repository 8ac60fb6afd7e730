// What an implementation of an op is. Each op has an ordered list of them, fastest first
// (registry.cpp); the first of the context's device that supports the call runs.
#pragma once

#include <moire/context.h>
#include <moire/expert_parallel.h>
#include <moire/grouped_gemm.h>
#include <moire/quantize.h>
#include <moire/routing.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/device_state.h"

namespace moire {

// Why an implementation cannot take a call; nothing if it can.
using Reason = std::optional<std::string>;

template <class A>
struct Implementation {
  std::string_view name;  // "cpu", "cuda", "portable", "sm90"
  Device device;
  Reason (*supports)(const DeviceState& state, const A& args);
  // Bytes of scratch, whatever the splits.
  size_t (*workspace)(const DeviceState& state, const A& args);
  // How it would run, for explain: tiles, blocks, threads.
  std::string (*policy)(const DeviceState& state, const A& args);
  // Arguments are valid, supported, and the workspace is large enough.
  Status (*run)(const Context& context, const A& args);
  // Kernels that it launches for such a call, for explain; null: one.
  int64_t (*launches)(const DeviceState& state, const A& args) = nullptr;
  // Also says whether its inputs are sound, or is waited for by other ranks, and so runs where
  // there is no element to write.
  bool always_runs = false;
};

// The ops by the names of their structs: the grouped GEMMs, and every other.
// clang-format off
#define MOIRE_FOR_EACH_GEMM(f)                                                                  \
  f(GroupedGemm) f(GroupedGemmGlu) f(GroupedGemmGluBackward) f(GroupedGemmWgrad)
#define MOIRE_FOR_EACH_OTHER_OP(f)                                                              \
  f(SplitsToOffsets)                                                                            \
  f(Quantize) f(QuantizeWeight) f(Dequantize) f(Requantize) f(ConvertScales) f(PrepareWeight)   \
  f(ConvertGlu) f(Glu) f(GluBackward) f(BiasBackward)                                           \
  f(Router) f(RouterBackward) f(PermutePlan) f(Permute) f(Unpermute) f(UnpermuteBackward)       \
  f(DispatchPlan) f(Dispatch) f(Combine)
// clang-format on
#define MOIRE_DECLARE_IMPLEMENTATION(Name) extern const Implementation<Name##Args> k##Name;

// The ordered list of one op, named by its argument struct.
template <class A>
std::span<const Implementation<A>> implementations();

// The form that prepare_weight makes of such a weight on such a device (core/prepared_weight.h).
enum class WeightForm : int32_t;
WeightForm prepared_form(const DeviceState& state, const PrepareWeightArgs& args);

template <class A>
Reason supports_everything(const DeviceState&, const A&) {
  return std::nullopt;
}
template <class A>
size_t no_workspace(const DeviceState&, const A&) {
  return 0;
}

}  // namespace moire
