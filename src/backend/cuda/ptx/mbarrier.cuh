// mbarrier: the barrier in shared memory that counts arrivals and bytes of asynchronous copies. One
// instruction per function; a barrier is named by its shared-memory address.
#pragma once

#include <cstdint>

namespace moire::cuda::ptx {

// The 32-bit shared-window address that shared-memory instructions take.
__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}

// Makes initialised barriers visible to the other blocks of the cluster and to the async proxy.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// One arrival, and `bytes` that asynchronous copies will still bring.
__device__ inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

#define MOIRE_ASK(question)                       \
  asm volatile(                                   \
      "{\n"                                       \
      ".reg .pred p;\n"                           \
      "mbarrier." question                        \
      ".parity.shared::cta.b64 p, [%1], %2;\n"    \
      "selp.b32 %0, 1, 0, p;\n"                   \
      "}"                                         \
      : "=r"(done)                                \
      : "r"(shared_address(barrier)), "r"(parity) \
      : "memory")
// Whether the phase of this parity is complete; waits a while before saying no.
__device__ inline bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  MOIRE_ASK("try_wait");
  return done != 0;
}
// Whether it is complete now.
__device__ inline bool mbarrier_test_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  MOIRE_ASK("test_wait");
  return done != 0;
}
#undef MOIRE_ASK

__device__ inline void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

}  // namespace moire::cuda::ptx
