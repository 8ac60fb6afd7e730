// TMA: bulk tensor copies between global and shared memory. One instruction per function.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backend/cuda/ptx/mbarrier.cuh"

namespace moire::cuda::ptx {

// A box of a tensor into shared memory; `barrier` receives its bytes.
__device__ inline void tma_load_2d(void* target, const CUtensorMap* map, uint64_t* barrier,
                                   int32_t x, int32_t y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

// The same into each block of the cluster whose bit is set in `blocks`, at the same offset; each
// block's barrier at the same offset receives the bytes.
__device__ inline void tma_load_2d_multicast(void* target, const CUtensorMap* map,
                                             uint64_t* barrier, int32_t x, int32_t y,
                                             uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

}  // namespace moire::cuda::ptx
