#include "cases.h"

namespace moire::tool {

Case make_case(Operands& operands) {
  switch (operands.problem().op) {
    case Op::kMlp:
    case Op::kMlpForward:
    case Op::kLinear:
      return make_layer_case(operands);
    case Op::kFc1:
    case Op::kFc1Glu:
    case Op::kFc1Dgrad:
    case Op::kFc1Wgrad:
    case Op::kFc2:
    case Op::kFc2Dgrad:
    case Op::kFc2DgradGlu:
    case Op::kFc2Wgrad:
    case Op::kBiasBackward:
      return make_gemm_case(operands);
    case Op::kGlu:
    case Op::kGluBackward:
    case Op::kConvertGlu:
      return make_glu_case(operands);
    case Op::kQuantize:
    case Op::kQuantizeWeight:
    case Op::kDequantize:
    case Op::kRequantize:
    case Op::kConvertScales:
      return make_quantize_case(operands);
    case Op::kRouter:
    case Op::kRouterBackward:
    case Op::kPermutePlan:
    case Op::kPermute:
    case Op::kUnpermute:
    case Op::kUnpermuteBackward:
    case Op::kSplitsToOffsets:
      return make_routing_case(operands);
  }
  return {};
}

}  // namespace moire::tool
