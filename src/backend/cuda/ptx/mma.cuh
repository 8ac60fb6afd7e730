// Warp-wide products of 16-bit matrices on tensor cores (sm_80 and newer), and how their operands
// come out of shared memory.
#pragma once

#include <cstdint>

namespace moire::cuda::ptx {

// Four 8 x 8 matrices of 16-bit elements; lane 8 i + r gives the address of row r of matrix i, 16
// bytes. values[i] has elements (lane / 4, 2 (lane % 4)) and the one beside it of matrix i.
__device__ inline void ldmatrix_x4(const void* row, uint32_t (&values)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
// The same of the matrices' transposes.
__device__ inline void ldmatrix_x4_trans(const void* row, uint32_t (&values)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// d += a * b, [16, 16] by [16, 8].
__device__ inline void mma_m16n8k16_bf16(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         float (&d)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma_m16n8k16_fp16(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         float (&d)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace moire::cuda::ptx
