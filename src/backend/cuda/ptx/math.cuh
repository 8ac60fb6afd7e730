// The special function unit's approximations, one instruction each.
#pragma once

namespace moire::cuda::ptx {

// 2^x within 2 ulp; subnormal inputs and results are taken for zero.
__device__ inline float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within 1 ulp; subnormal inputs and results are taken for zero.
__device__ inline float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace moire::cuda::ptx
