// What Highway chose on this machine. Files with kernels are compiled once per target of
// simd_targets.h and dispatched at run time.
#pragma once

#include <string>

namespace moire::cpu {

// "AVX2", "AVX-512", ...: the best target that this processor and this build share.
std::string simd_target();
// Whether that target has fused multiply-add, on which the bits of every GEMM depend.
bool has_fused_multiply_add();

}  // namespace moire::cpu
