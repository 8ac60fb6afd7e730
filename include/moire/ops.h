// The ops of moire.h by name: MOIRE_FOR_EACH_OP(f, g) is f(quantize), g(grouped_gemm) and so on, g
// for those that have a workspace twin. Layers are composites; all others have implementations,
// and all but prepare_weight, whose result is opaque, and what ranks do together results that a
// reference defines of one call.
#pragma once

// clang-format off
#define MOIRE_FOR_EACH_DEFINED_OP(f, g)                              \
  g(splits_to_offsets)                                               \
  g(quantize) f(quantize_weight) f(dequantize) f(requantize)         \
  f(convert_scales)                                                  \
  f(glu) f(glu_backward) f(convert_glu)                              \
  g(grouped_gemm) g(grouped_gemm_glu) g(grouped_gemm_glu_backward)   \
  g(grouped_gemm_wgrad) g(bias_backward)                             \
  f(router) f(router_backward)                                       \
  g(permute_plan) f(permute) f(unpermute) f(unpermute_backward)
#define MOIRE_FOR_EACH_LAYER(f, g)                                   \
  g(grouped_linear) g(grouped_linear_backward)                       \
  g(grouped_mlp) g(grouped_mlp_backward)
#define MOIRE_FOR_EACH_IMPLEMENTED_OP(f, g)                          \
  MOIRE_FOR_EACH_DEFINED_OP(f, g) g(prepare_weight)                  \
  g(dispatch_plan) f(dispatch) f(combine)
#define MOIRE_FOR_EACH_OP(f, g)                                      \
  MOIRE_FOR_EACH_IMPLEMENTED_OP(f, g) MOIRE_FOR_EACH_LAYER(f, g)
// clang-format on

// Declares an op in C++: its struct (moire.h says what is in it) and its entry; of an op that takes
// scratch also the twin that sizes it.
#define MOIRE_DECLARE_OP(name, ArgsOfOp)      \
  using ArgsOfOp = Args<moire_##name##_args>; \
  MOIRE_API Status name(const Context& context, const ArgsOfOp& args);
#define MOIRE_DECLARE_OP_WITH_WORKSPACE(name, ArgsOfOp) \
  MOIRE_DECLARE_OP(name, ArgsOfOp)                      \
  MOIRE_API Status name##_workspace(const Context& context, const ArgsOfOp& args, size_t* bytes);
