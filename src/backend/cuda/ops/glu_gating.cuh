// What the activation's kernels that quantise read: rows of z in pieces of eight columns.
#pragma once

#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/device/eight.cuh"
#include "backend/cuda/device/glu_columns.cuh"
#include "backend/cuda/device/matrix.cuh"

namespace moire::cuda::ops {

using Packed8 = Packed<__nv_bfloat16, kEight>;

// Of z's rows: what lies where, and what becomes of it.
template <class Columns>
struct Gating {
  Matrix<const __nv_bfloat16> z;
  const float* probs;  // or null
  Columns columns;
  AnyActivation activation;

  __device__ float prob(int64_t row) const { return probs == nullptr ? 1.0F : probs[row]; }
};

template <class Columns>
Gating<Columns> gating_of(const auto& args, const Columns& columns) {
  return {matrix_of<const __nv_bfloat16>(args.z), vector_of<const float>(args.probs), columns,
          AnyActivation{args.activation}};
}

// Eight values in shared memory, read anew at each use: a compiler would keep them in registers.
__device__ inline Eight<__nv_bfloat16> eight_at(uint32_t shared_address) {
  Eight<__nv_bfloat16> out;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.words[0]), "=r"(out.words[1]), "=r"(out.words[2]), "=r"(out.words[3])
               : "r"(shared_address));
  return out;
}

// Calls f(Columns) for pieces of a layout.
template <class F>
void with_pieces(const ResolvedGluLayout& layout, F&& f) {
  if (!layout.is_gated) return f(GluGates<kEight>());
  if (layout.block == 1) return f(GluPairs<kEight>(layout));
  return f(GluBlocks<kEight>(layout));
}

}  // namespace moire::cuda::ops
