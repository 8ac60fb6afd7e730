// The grouped GEMMs with the FP8 operands and outputs that their kernels leave to others
// (ops/quantized_product.h): those of sm90 multiply and store BF16, those of portable multiply
// operands of one kind and store floats.
#pragma once

#include "backend/implementation.h"

namespace moire::cuda {

namespace sm90::with_fp8 {

extern const Implementation<GroupedGemmArgs> kGroupedGemm;
extern const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu;
extern const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward;
extern const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad;

}  // namespace sm90::with_fp8

namespace portable::with_fp8 {

extern const Implementation<GroupedGemmArgs> kGroupedGemm;
extern const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu;
extern const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward;
extern const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad;

}  // namespace portable::with_fp8

}  // namespace moire::cuda
