// The ordered list of implementations of each op, fastest first. A new backend is one more entry
// per line.
#include <moire/explain.h>
#include <moire/ops.h>

#include <vector>

#include "backend/cpu/implementations.h"
#include "backend/implementation.h"

#if MOIRE_HAS_CUDA
#include "backend/cuda/implementations.h"
#define MOIRE_CUDA(...) __VA_ARGS__,
#else
#define MOIRE_CUDA(...)
#endif

namespace moire {

#define MOIRE_OP(ArgsType, ...)                                   \
  template <>                                                     \
  std::span<const Implementation<ArgsType>> implementations() {   \
    static const Implementation<ArgsType> list[] = {__VA_ARGS__}; \
    return list;                                                  \
  }

MOIRE_OP(SplitsToOffsetsArgs, MOIRE_CUDA(cuda::ops::kSplitsToOffsets) cpu::kSplitsToOffsets)
MOIRE_OP(QuantizeArgs, MOIRE_CUDA(cuda::ops::kQuantize) cpu::kQuantize)
MOIRE_OP(QuantizeWeightArgs, MOIRE_CUDA(cuda::ops::kQuantizeWeight) cpu::kQuantizeWeight)
MOIRE_OP(DequantizeArgs, MOIRE_CUDA(cuda::ops::kDequantize) cpu::kDequantize)
MOIRE_OP(RequantizeArgs, MOIRE_CUDA(cuda::ops::kRequantize) cpu::kRequantize)
MOIRE_OP(ConvertScalesArgs, MOIRE_CUDA(cuda::ops::kConvertScales) cpu::kConvertScales)
MOIRE_OP(PrepareWeightArgs, MOIRE_CUDA(cuda::ops::kPrepareWeight) cpu::kPrepareWeight)
MOIRE_OP(ConvertGluArgs, MOIRE_CUDA(cuda::ops::kConvertGlu) cpu::kConvertGlu)
MOIRE_OP(GluArgs, MOIRE_CUDA(cuda::ops::kGlu) cpu::kGlu)
MOIRE_OP(GluBackwardArgs, MOIRE_CUDA(cuda::ops::kGluBackward) cpu::kGluBackward)
MOIRE_OP(BiasBackwardArgs, MOIRE_CUDA(cuda::ops::kBiasBackward) cpu::kBiasBackward)
MOIRE_OP(GroupedGemmArgs, MOIRE_CUDA(cuda::sm90::with_fp8::kGroupedGemm,
                                     cuda::portable::with_fp8::kGroupedGemm) cpu::kGroupedGemm)
MOIRE_OP(GroupedGemmGluArgs,
         MOIRE_CUDA(cuda::sm90::with_fp8::kGroupedGemmGlu,
                    cuda::portable::with_fp8::kGroupedGemmGlu) cpu::kGroupedGemmGlu)
MOIRE_OP(GroupedGemmGluBackwardArgs,
         MOIRE_CUDA(cuda::sm90::with_fp8::kGroupedGemmGluBackward,
                    cuda::portable::with_fp8::kGroupedGemmGluBackward) cpu::kGroupedGemmGluBackward)
MOIRE_OP(GroupedGemmWgradArgs,
         MOIRE_CUDA(cuda::sm90::with_fp8::kGroupedGemmWgrad,
                    cuda::portable::with_fp8::kGroupedGemmWgrad) cpu::kGroupedGemmWgrad)
MOIRE_OP(RouterArgs, MOIRE_CUDA(cuda::ops::kRouter) cpu::kRouter)
MOIRE_OP(RouterBackwardArgs, MOIRE_CUDA(cuda::ops::kRouterBackward) cpu::kRouterBackward)
MOIRE_OP(PermutePlanArgs, MOIRE_CUDA(cuda::ops::kPermutePlan) cpu::kPermutePlan)
MOIRE_OP(PermuteArgs, MOIRE_CUDA(cuda::ops::kPermute) cpu::kPermute)
MOIRE_OP(UnpermuteArgs, MOIRE_CUDA(cuda::ops::kUnpermute) cpu::kUnpermute)
MOIRE_OP(UnpermuteBackwardArgs, MOIRE_CUDA(cuda::ops::kUnpermuteBackward) cpu::kUnpermuteBackward)
MOIRE_OP(DispatchPlanArgs, MOIRE_CUDA(cuda::ops::kDispatchPlan) cpu::kDispatchPlan)
MOIRE_OP(DispatchArgs, MOIRE_CUDA(cuda::ops::kDispatch) cpu::kDispatch)
MOIRE_OP(CombineArgs, MOIRE_CUDA(cuda::ops::kCombine) cpu::kCombine)

#undef MOIRE_OP

WeightForm prepared_form(const DeviceState& state, const PrepareWeightArgs& args) {
#if MOIRE_HAS_CUDA
  if (state.device == Device::kCuda) return cuda::ops::prepared_form(state, args);
#endif
  return cpu::prepared_form(state, args);
}

namespace {

template <class A>
void append(std::string_view op, std::vector<AvailableImplementation>& out) {
  for (const Implementation<A>& i : implementations<A>()) {
    out.push_back({std::string(op), std::string(device_name(i.device)), std::string(i.name)});
  }
}

}  // namespace

std::vector<AvailableImplementation> available_implementations() {
  std::vector<AvailableImplementation> out;
#define MOIRE_APPEND(name) append<Args<moire_##name##_args>>(#name, out);
  MOIRE_FOR_EACH_IMPLEMENTED_OP(MOIRE_APPEND, MOIRE_APPEND)
#undef MOIRE_APPEND
  return out;
}

}  // namespace moire
