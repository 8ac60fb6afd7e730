// ldmatrix and, on Hopper, stmatrix: four 8 x 8 matrices of 16-bit elements between shared memory
// and a warp's registers. Lane l gives the address of row l % 8 of matrix l / 8; of matrix i it
// holds the pair of row l / 4 that starts at column 2 (l % 4), in r[i]. And a warp's product of
// such matrices on tensor cores (sm_80 and newer). One instruction per function.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace moire::cuda::ptx {

__device__ inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
// Each matrix turned over: lane l gives the address of column l % 8.
__device__ inline void stmatrix_x4_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

__device__ inline void ldmatrix_x4(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void ldmatrix_x4_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// d += a * b, [16, 16] by [16, 8], of BF16 or FP16.
#define MOIRE_MMA(type)                                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <class T>
__device__ inline void mma_m16n8k16(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    float (&d)[4]) {
  if constexpr (std::is_same_v<T, __half>) {
    MOIRE_MMA("f16");
  } else {
    MOIRE_MMA("bf16");
  }
}
#undef MOIRE_MMA

}  // namespace moire::cuda::ptx
