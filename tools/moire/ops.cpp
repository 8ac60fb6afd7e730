#include "ops.h"

#include "text.h"

namespace moire::tool {

const std::vector<Op>& all_ops() {
  static const decltype(OpCall::names) of_linear = {
      {"w", "w1"}, {"bias", "b1"}, {"scale", "probs"}, {"K", "H"}, {"N", "Z"}};
  static const std::vector<Op> ops = {
      {"mlp",
       "the whole layer, forward and backward",
       {{"grouped_mlp", {}, kForward}, {"grouped_mlp_backward", {}, kBackward}}},
      {"mlp_forward", "y = glu(x W1^T + b1) p W2^T + p b2", {{"grouped_mlp", {}, kForward}}},
      {"linear",
       "y = x W1^T + p b1, forward and backward",
       {{"grouped_linear", of_linear, kFc1},
        {"grouped_linear_backward", of_linear, kFc1Dgrad | kFc1Wgrad}}},
      {"fc1",
       "z = x W1^T + b1",
       {{"grouped_gemm", {{"a", "x"}, {"b", "w1"}, {"bias", "b1"}, {"K", "H"}, {"N", "Z"}}, kFc1}}},
      {"fc1_glu",
       "z = x W1^T + b1, act = glu(z) p",
       {{"grouped_gemm_glu", {{"a", "x"}, {"b", "w1"}, {"bias", "b1"}}, kFc1}}},
      {"fc1_dgrad",
       "dx = dz W1",
       {{"grouped_gemm", {{"a", "grad_z"}, {"b", "w1"}, {"K", "Z"}, {"N", "H"}}, kFc1Dgrad}}},
      {"fc1_wgrad",
       "dW1 = beta dW1 + dz^T x",
       {{"grouped_gemm_wgrad",
         {{"a", "grad_z"}, {"b", "x"}, {"d", "grad_w1"}, {"M", "Z"}, {"N", "H"}},
         kFc1Wgrad}}},
      {"fc2",
       "y = act W2^T + p b2",
       {{"grouped_gemm",
         {{"a", "act"}, {"b", "w2"}, {"bias", "b2"}, {"bias_scale", "probs"}, {"K", "F"}},
         kFc2}}},
      {"fc2_dgrad",
       "dact = dy W2",
       {{"grouped_gemm", {{"a", "grad_y"}, {"b", "w2"}, {"K", "N"}, {"N", "F"}}, kFc2Dgrad}}},
      {"fc2_dgrad_glu",
       "dact = dy W2, then dz, dp, act, db1",
       {{"grouped_gemm_glu_backward", {{"grad_bias", "grad_b1"}}, kFc2Dgrad}}},
      {"fc2_wgrad",
       "dW2 = beta dW2 + dy^T act",
       {{"grouped_gemm_wgrad",
         {{"a", "grad_y"}, {"b", "act"}, {"d", "grad_w2"}, {"M", "N"}, {"N", "F"}},
         kFc2Wgrad}}},
      {"bias_backward",
       "db2 = sum p dy, dp = dy b2",
       {{"bias_backward",
         {{"scale", "probs"}, {"bias", "b2"}, {"grad_bias", "grad_b2"}},
         0,
         4,
         'N'}}},
      {"glu", "act = glu(z) p", {{"glu", {}, 0, 8}}},  // exp counts as 4
      {"glu_backward", "dz, dp and act from dact", {{"glu_backward", {}, 0, 16}}},
      {"convert_glu",
       "W1, or its codes and scales: halves to `layout` where seed is odd, else `layout` to halves",
       {{"convert_glu", {{"source", "w1"}, {"target", "converted"}}},
        {"convert_glu", {{"source", "w1 scales"}, {"target", "converted scales"}}}}},
      {"quantize", "x to FP8 codes and scales", {{"quantize", {{"source", "x"}, {"K", "H"}}}}},
      {"quantize_grad",
       "dy to FP8 codes and scales, db2 = sum dy",
       {{"quantize", {{"source", "grad_y"}, {"grad_bias", "grad_b2"}, {"K", "N"}}}}},
      {"quantize_weight",
       "W1 to FP8 codes and scales",
       {{"quantize_weight", {{"source", "w1"}, {"K", "H"}, {"N", "Z"}}}}},
      {"dequantize",
       "FP8 codes times scales, of x or (tiles) of W1",
       {{"dequantize", {{"source", "x"}, {"target", "decoded"}, {"K", "H"}, {"N", "Z"}}}}},
      {"requantize",
       "FP8 from one direction to the other",
       {{"requantize", {{"source", "x"}, {"K", "H"}}}}},
      // And back from what the first call wrote.
      {"convert_scales",
       "scales to `scales` and back",
       {{"convert_scales", {{"source", "scales"}, {"target", "converted"}}},
        {"convert_scales", {{"source", "converted"}, {"target", "converted"}}}}},
      {"router", "top-k experts of each token and their weights", {{"router", {}}}, true},
      {"router_backward",
       "gradient of the logits",
       {{"router_backward", {{"topk_idx", "choices"}}}},
       true},
      {"permute_plan", "offsets, gather and scatter indices", {{"permute_plan", {}}}, true},
      {"permute", "tokens into expert order", {{"permute", {}}}},
      {"unpermute",
       "weighted sum back to tokens",
       {{"unpermute", {{"weights", "topk_weights"}}, 0, 2, 'H'}}},
      {"unpermute_backward",
       "gradients of rows and weights",
       {{"unpermute_backward", {{"weights", "topk_weights"}}, 0, 3, 'H'}}},
      {"splits_to_offsets", "offsets from splits", {{"splits_to_offsets", {}}}, true},
      {"dispatch_plan", "which token goes where, of `ranks`", {{"dispatch_plan", {}}}, true},
      {"dispatch", "tokens to the ranks of their experts", {{"dispatch", {}}}},
      {"combine", "their rows back, added", {{"combine", {}}}},
      {"exchange",
       "dispatch_plan, dispatch and combine",
       {{"dispatch_plan", {}}, {"dispatch", {}}, {"combine", {}}}},
  };
  return ops;
}

const Op* find_op(std::string_view name) { return find_row(all_ops(), &Op::name, name); }

std::string_view OpCall::name_of(std::string_view field) const {
  const Name* const name = find_row(names, &Name::first, field);
  return name == nullptr ? field : name->second;
}

int Op::products() const {
  int all = 0;
  for (const OpCall& call : calls) all |= call.products;
  return all;
}

}  // namespace moire::tool
