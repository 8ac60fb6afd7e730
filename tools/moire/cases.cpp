#include "cases.h"

#include "commands.h"
#include "machine.h"
#include "text.h"

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

int32_t accumulation_of(const Problem& p) {
  if (p.emulated) return MOIRE_ACCUMULATE_EMULATED;
  return p.fast ? MOIRE_ACCUMULATE_FAST : MOIRE_ACCUMULATE_EXACT;
}

int32_t recipe_of(const Problem& p) {
  if (p.quantization == Quantization::kNone) return MOIRE_RECIPE_AS_STORED;
  if (p.quantization != Quantization::kMxfp8) return MOIRE_RECIPE_FP8_BLOCK;
  return p.fast ? MOIRE_RECIPE_MXFP8_FAST : MOIRE_RECIPE_MXFP8;
}

void require_memory_for(const Context& context, const Problem& problem) {
  Operands operands(problem, Operands::Content::kNone);
  for (const Call& call : make_case(operands).calls) {
    size_t bytes = 0;
    if (call.workspace == nullptr || !call.workspace(context, &bytes).ok()) continue;
    operands.workspace(bytes);
  }
  const int64_t free = available_memory_bytes();
  if (operands.bytes() <= free) return;
  throw UsageError(text("found a problem of at least ",
                        human_bytes(static_cast<double>(operands.bytes())), ", needed at most the ",
                        human_bytes(static_cast<double>(free)), " that this machine has free: ",
                        to_line(problem), "; --set rows=64 --set groups=8 makes it smaller"));
}

}  // namespace moire::tool
