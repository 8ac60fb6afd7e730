#include "ops.h"

#include <algorithm>

namespace moire::tool {

const std::vector<OpInfo>& all_ops() {
  static const std::vector<OpInfo> ops = {
      {Op::kMlp, "mlp", "grouped_mlp", "the whole layer, forward and backward"},
      {Op::kMlpForward, "mlp_forward", "grouped_mlp", "y = glu(x W1^T + b1) p W2^T + p b2"},
      {Op::kLinear, "linear", "grouped_linear", "y = x W1^T + p b1, forward and backward"},
      {Op::kFc1, "fc1", "grouped_gemm", "z = x W1^T + b1"},
      {Op::kFc1Glu, "fc1_glu", "grouped_gemm_glu", "z = x W1^T + b1, act = glu(z) p"},
      {Op::kFc1Dgrad, "fc1_dgrad", "grouped_gemm", "dx = dz W1"},
      {Op::kFc1Wgrad, "fc1_wgrad", "grouped_gemm_wgrad", "dW1 = beta dW1 + dz^T x"},
      {Op::kFc2, "fc2", "grouped_gemm", "y = act W2^T + p b2"},
      {Op::kFc2Dgrad, "fc2_dgrad", "grouped_gemm", "dact = dy W2"},
      {Op::kFc2DgradGlu, "fc2_dgrad_glu", "grouped_gemm_glu_backward",
       "dact = dy W2, then dz, dp, act, db1"},
      {Op::kFc2Wgrad, "fc2_wgrad", "grouped_gemm_wgrad", "dW2 = beta dW2 + dy^T act"},
      {Op::kBiasBackward, "bias_backward", "bias_backward", "db2 = sum p dy, dp = dy b2"},
      {Op::kGlu, "glu", "glu", "act = glu(z) p"},
      {Op::kGluBackward, "glu_backward", "glu_backward", "dz, dp and act from dact"},
      {Op::kConvertGlu, "convert_glu", "convert_glu", "W1 from two halves to `layout`"},
      {Op::kQuantize, "quantize", "quantize", "x to FP8 codes and scales"},
      {Op::kQuantizeWeight, "quantize_weight", "quantize_weight", "W1 to FP8 codes and scales"},
      {Op::kDequantize, "dequantize", "dequantize",
       "FP8 codes times scales, of x or (tiles) of W1"},
      {Op::kRequantize, "requantize", "requantize", "FP8 from one direction to the other"},
      {Op::kConvertScales, "convert_scales", "convert_scales", "scales to `scales` and back"},
      {Op::kRouter, "router", "router", "top-k experts of each token and their weights"},
      {Op::kRouterBackward, "router_backward", "router_backward", "gradient of the logits"},
      {Op::kPermutePlan, "permute_plan", "permute_plan", "offsets, gather and scatter indices"},
      {Op::kPermute, "permute", "permute", "tokens into expert order"},
      {Op::kUnpermute, "unpermute", "unpermute", "weighted sum back to tokens"},
      {Op::kUnpermuteBackward, "unpermute_backward", "unpermute_backward",
       "gradients of rows and weights"},
      {Op::kSplitsToOffsets, "splits_to_offsets", "splits_to_offsets", "offsets from splits"},
  };
  return ops;
}

const OpInfo& info_of(Op op) {
  const auto& ops = all_ops();
  return *std::find_if(ops.begin(), ops.end(), [&](const OpInfo& info) { return info.op == op; });
}

std::optional<Op> find_op(std::string_view name) {
  for (const OpInfo& info : all_ops()) {
    if (info.name == name) return info.op;
  }
  return std::nullopt;
}

}  // namespace moire::tool
