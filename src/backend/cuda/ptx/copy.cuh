// Copies to shared memory that a thread asks for and waits for (cuda_pipeline.h commits and waits).
#pragma once

#include "backend/cuda/ptx/mbarrier.cuh"

namespace moire::cuda::ptx {

// 16 bytes, both addresses multiples of 16; zeros, and nothing is read, unless `is_there`.
__device__ inline void copy_async(void* shared, const void* global, bool is_there) {
  asm volatile(
      "{.reg .pred is_not;\n"
      "setp.eq.u32 is_not, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, is_not;}" ::"r"(shared_address(shared)),
      "l"(global), "r"(static_cast<uint32_t>(is_there))
      : "memory");
}

}  // namespace moire::cuda::ptx
