// Warp-wide products of 16-bit matrices on tensor cores (sm_80 and newer).
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace moire::cuda::ptx {

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
