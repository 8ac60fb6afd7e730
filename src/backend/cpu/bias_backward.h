// The operands of one task of bias_backward, the same type for every SIMD target.
#pragma once

#include <moire/tensor.h>

#include "backend/cpu/row_blocks.h"
#include "backend/cpu/rows.h"

namespace moire::cpu {

// Rows block.first ... block.end - 1; null pointers stand for what is absent or not asked for.
struct BiasBlock {
  RowBlock block;
  TensorView grad_y;
  TensorView row_idx;
  const float* scale;  // [capacity]
  const void* bias;    // the group's row, dtype bias_dtype
  DType bias_dtype;
  float* partial;     // [n], overwritten
  float* grad_scale;  // [capacity]
  bool accumulate_scale;
};

// Columns first ... first + n - 1 of one group's gradient, from its partial sums.
struct BiasSum {
  const float* partials;  // of the group's first block
  int64_t num_partials;
  int64_t pitch;
  int64_t first;
  int64_t n;  // at most kBiasColumns
  bool accumulate;
  DType dtype;
  void* grad_bias;  // the group's row
};

// Columns that a task holds in FP32 at a time.
inline constexpr int64_t kBiasColumns = 512;

}  // namespace moire::cpu
