// What Highway is told before any of its headers is included: its namespace and the SIMD targets.
#pragma once

// A namespace of moire's own: what libmoire.a defines of Highway (highway_runtime.cpp, and
// templates that were not inlined) never meets the libhwy of a program that links both.
#define hwy moire_highway

// The targets that kernels are compiled for. Left out, by the bits that Highway gives them in every
// version: those without fused multiply-add, on which the bits of a GEMM depend (SSE4 12 and
// below), and those that add only instructions that no kernel here uses (AVX3_DL and the like).
#define HWY_DISABLED_TARGETS                                                                     \
  ((1LL << 4) | (1LL << 5) | (1LL << 6) | (1LL << 7) | (1LL << 11) | (1LL << 12) | (1LL << 13) | \
   (1LL << 14))
