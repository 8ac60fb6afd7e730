// Sums as Hopper's FP8 tensor cores make them, for study (MOIRE_ACCUMULATE_EMULATED).
//
// The model, on decoded operands (data * scale): products come 32 at a time in order of k, an MMA.
// Each term of an MMA, the 32 exact products and what is accumulated so far, is cut towards zero to
// a multiple of 2^(e - 13), where e is the largest exponent among the terms (of a product: the sum
// of its factors' exponents); the cut terms are added exactly. After 128 products the accumulator
// is added to the FP32 sum and starts at zero again. Those sums of one K block are added in order,
// as are the blocks.
#pragma once

#include "backend/cpu/gemm/kernels.h"

namespace moire::cpu::gemm {

inline constexpr int64_t kMmaProducts = 32;
inline constexpr int64_t kPromotedProducts = 128;
inline constexpr int kMmaFractionBits = 13;

// The set whose `multiply` sums so; scalar, hence slow.
Kernels emulating(const Kernels& set);

}  // namespace moire::cpu::gemm
