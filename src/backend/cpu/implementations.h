// The CPU's implementation of every op; one file each.
#pragma once

#include "backend/implementation.h"

namespace moire::cpu {

extern const Implementation<SplitsToOffsetsArgs> kSplitsToOffsets;
extern const Implementation<QuantizeArgs> kQuantize;
extern const Implementation<QuantizeWeightArgs> kQuantizeWeight;
extern const Implementation<DequantizeArgs> kDequantize;
extern const Implementation<RequantizeArgs> kRequantize;
extern const Implementation<ConvertScalesArgs> kConvertScales;
extern const Implementation<PrepareWeightArgs> kPrepareWeight;
WeightForm prepared_form(const DeviceState& state, const PrepareWeightArgs& args);
extern const Implementation<ConvertGluArgs> kConvertGlu;
extern const Implementation<GluArgs> kGlu;
extern const Implementation<GluBackwardArgs> kGluBackward;
extern const Implementation<BiasBackwardArgs> kBiasBackward;
extern const Implementation<GroupedGemmArgs> kGroupedGemm;
extern const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu;
extern const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward;
extern const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad;
extern const Implementation<RouterArgs> kRouter;
extern const Implementation<RouterBackwardArgs> kRouterBackward;
extern const Implementation<PermutePlanArgs> kPermutePlan;
extern const Implementation<PermuteArgs> kPermute;
extern const Implementation<UnpermuteArgs> kUnpermute;
extern const Implementation<UnpermuteBackwardArgs> kUnpermuteBackward;
extern const Implementation<DispatchPlanArgs> kDispatchPlan;
extern const Implementation<DispatchArgs> kDispatch;
extern const Implementation<CombineArgs> kCombine;

}  // namespace moire::cpu
