// TMA: bulk tensor copies between global and shared memory. One instruction per function.
#pragma once

#include <cuda.h>

#include "backend/cuda/ptx/mbarrier.cuh"

namespace moire::cuda::ptx {

// A box of a tensor into shared memory; `barrier` receives its bytes. What lies outside the tensor
// becomes zeros, and counts as bytes.
#define MOIRE_LOAD(dimensions, names, ...)                                      \
  asm volatile("cp.async.bulk.tensor." dimensions                               \
               ".shared::cluster.global.mbarrier::complete_tx::bytes"           \
               " [%0], [%1, {" names "}], [%2];" ::"r"(shared_address(target)), \
               "l"(map), "r"(shared_address(barrier)), __VA_ARGS__              \
               : "memory")
__device__ inline void tma_load_2d(void* target, const CUtensorMap* map, uint64_t* barrier,
                                   int32_t c0, int32_t c1) {
  MOIRE_LOAD("2d", "%3, %4", "r"(c0), "r"(c1));
}
__device__ inline void tma_load_3d(void* target, const CUtensorMap* map, uint64_t* barrier,
                                   int32_t c0, int32_t c1, int32_t c2) {
  MOIRE_LOAD("3d", "%3, %4, %5", "r"(c0), "r"(c1), "r"(c2));
}
__device__ inline void tma_load_4d(void* target, const CUtensorMap* map, uint64_t* barrier,
                                   int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  MOIRE_LOAD("4d", "%3, %4, %5, %6", "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
__device__ inline void tma_load_5d(void* target, const CUtensorMap* map, uint64_t* barrier,
                                   int32_t c0, int32_t c1, int32_t c2, int32_t c3, int32_t c4) {
  MOIRE_LOAD("5d", "%3, %4, %5, %6, %7", "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4));
}
#undef MOIRE_LOAD

// A box from shared memory into a tensor; what lies outside the tensor is not stored.
#define MOIRE_STORE(dimensions, names, ...)                                                     \
  asm volatile("cp.async.bulk.tensor." dimensions ".global.shared::cta.bulk_group [%1, {" names \
               "}], [%0];" ::"r"(shared_address(source)),                                       \
               "l"(map), __VA_ARGS__                                                            \
               : "memory")
__device__ inline void tma_store_3d(const CUtensorMap* map, const void* source, int32_t c0,
                                    int32_t c1, int32_t c2) {
  MOIRE_STORE("3d", "%2, %3, %4", "r"(c0), "r"(c1), "r"(c2));
}
__device__ inline void tma_store_4d(const CUtensorMap* map, const void* source, int32_t c0,
                                    int32_t c1, int32_t c2, int32_t c3) {
  MOIRE_STORE("4d", "%2, %3, %4, %5", "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
__device__ inline void tma_store_5d(const CUtensorMap* map, const void* source, int32_t c0,
                                    int32_t c1, int32_t c2, int32_t c3, int32_t c4) {
  MOIRE_STORE("5d", "%2, %3, %4, %5, %6", "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4));
}
#undef MOIRE_STORE
// Adds a box from shared memory to what a tensor holds, in the L2. The map says of which type: of
// FP32 (not FP32_FTZ) sums are rounded to nearest even, and subnormal numbers kept.
__device__ inline void tma_reduce_add_3d(const CUtensorMap* map, const void* source, int32_t c0,
                                         int32_t c1, int32_t c2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%1, {%2, %3, %4}], "
      "[%0];" ::"r"(shared_address(source)),
      "l"(map), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// This thread's stores since the last commit become one group.
__device__ inline void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most kPending of this thread's groups still read shared memory.
template <int kPending>
__device__ inline void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Orders this thread's accesses of shared memory before asynchronous copies that follow.
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace moire::cuda::ptx
