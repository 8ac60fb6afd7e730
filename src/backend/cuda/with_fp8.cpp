#include "backend/cuda/with_fp8.h"

#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/quantized_product.h"

namespace moire::cuda {

using ops::Decoding;
using ops::quantized_product;

namespace sm90::with_fp8 {

const Implementation<GroupedGemmArgs> kGroupedGemm =
    quantized_product<GroupedGemmArgs, sm90::kGroupedGemm, Decoding::kMxfp8>("sm90");
const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu =
    quantized_product<GroupedGemmGluArgs, sm90::kGroupedGemmGlu, Decoding::kMxfp8>("sm90");
const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward =
    quantized_product<GroupedGemmGluBackwardArgs, sm90::kGroupedGemmGluBackward, Decoding::kMxfp8>(
        "sm90");
const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad =
    quantized_product<GroupedGemmWgradArgs, sm90::kGroupedGemmWgrad, Decoding::kMxfp8>("sm90");

}  // namespace sm90::with_fp8

namespace portable::with_fp8 {

const Implementation<GroupedGemmArgs> kGroupedGemm =
    quantized_product<GroupedGemmArgs, portable::kGroupedGemm, Decoding::kBesideBf16>("portable");
const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu =
    quantized_product<GroupedGemmGluArgs, portable::kGroupedGemmGlu, Decoding::kBesideBf16>(
        "portable");
const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward =
    quantized_product<GroupedGemmGluBackwardArgs, portable::kGroupedGemmGluBackward,
                      Decoding::kBesideBf16>("portable");
const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad =
    quantized_product<GroupedGemmWgradArgs, portable::kGroupedGemmWgrad, Decoding::kBesideBf16>(
        "portable");

}  // namespace portable::with_fp8

}  // namespace moire::cuda
