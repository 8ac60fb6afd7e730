// The ordered list of implementations of each op, fastest first. A new backend is one more entry
// per line.
#include "backend/cpu/implementations.h"
#include "backend/implementation.h"

namespace moire {

#define MOIRE_OP(ArgsType, ...)                                   \
  template <>                                                     \
  std::span<const Implementation<ArgsType>> implementations() {   \
    static const Implementation<ArgsType> list[] = {__VA_ARGS__}; \
    return list;                                                  \
  }

MOIRE_OP(SplitsToOffsetsArgs, cpu::kSplitsToOffsets)
MOIRE_OP(ConvertGluArgs, cpu::kConvertGlu)
MOIRE_OP(GluArgs, cpu::kGlu)
MOIRE_OP(GluBackwardArgs, cpu::kGluBackward)
MOIRE_OP(BiasBackwardArgs, cpu::kBiasBackward)
MOIRE_OP(GroupedGemmArgs, cpu::kGroupedGemm)
MOIRE_OP(GroupedGemmGluArgs, cpu::kGroupedGemmGlu)
MOIRE_OP(GroupedGemmGluBackwardArgs, cpu::kGroupedGemmGluBackward)
MOIRE_OP(GroupedGemmWgradArgs, cpu::kGroupedGemmWgrad)
MOIRE_OP(RouterArgs, cpu::kRouter)
MOIRE_OP(RouterBackwardArgs, cpu::kRouterBackward)
MOIRE_OP(PermutePlanArgs, cpu::kPermutePlan)
MOIRE_OP(PermuteArgs, cpu::kPermute)
MOIRE_OP(UnpermuteArgs, cpu::kUnpermute)
MOIRE_OP(UnpermuteBackwardArgs, cpu::kUnpermuteBackward)

#undef MOIRE_OP

}  // namespace moire
