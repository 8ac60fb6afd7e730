// Products as Hopper's FP8 tensor cores make them, for study (MOIRE_ACCUMULATE_EMULATED): folded,
// elements alone, summed as core/fp8_tensor_core.h has it. Scalar, hence slow.
#pragma once

#include "backend/cpu/gemm/operands.h"
#include "backend/cpu/gemm/scratch.h"
#include "backend/cpu/gemm/tiling.h"
#include "core/fp8_tensor_core.h"

namespace moire::cpu::gemm {

// An FP8 operand as vectors along k: rows of a matrix, or its columns from row `first_k` on.
struct Fp8Vectors {
  RowReader matrix;
  bool k_is_last;
  int64_t first_k = 0;
  int64_t tiled = 0;  // of a weight its vectors, which are folded 128 together; else 0

  // Elements [k, k + n) of a vector, folded; k is a multiple of 128, n 128 or what is left. Returns
  // their scale.
  float read(int64_t vector, int64_t k, int64_t n, float* target) const;

 private:
  Fp8Row row(int64_t vector, int64_t k) const {
    return matrix.fp8_row(k_is_last ? vector : first_k + k);
  }
};

// Floats that `emulate` stages for so many vectors of an operand: elements, then scales.
inline constexpr int64_t emulated_vectors(int64_t count) { return count * (kPromotedProducts + 1); }

// The tile's sums as [rows][columns].
void emulate(const Fp8Vectors& left, const Fp8Vectors& right, int64_t num_k, const Columns& columns,
             const Tile& tile, const Scratch& scratch);

}  // namespace moire::cpu::gemm
