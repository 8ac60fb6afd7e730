// Single instructions: approximations of the special function unit, and a load.
#pragma once

#include <cstdint>

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

// Reads what no kernel writes meanwhile, here and not where it is first used.
__device__ inline float load_early(const float* p) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(p));
  return value;
}
__device__ inline uint32_t load_early(const uint8_t* p) {
  uint32_t value;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(value) : "l"(p));
  return value;
}
// Two bytes, the first in the low one.
__device__ inline uint32_t load_pair_early(const uint8_t* p) {
  uint16_t value;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(p));
  return value;
}

}  // namespace moire::cuda::ptx
