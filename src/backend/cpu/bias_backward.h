// The operands of one task of bias_backward, the same type for every SIMD target.
#pragma once

#include <moire/grouped_gemm.h>

#include "backend/cpu/row_blocks.h"
#include "backend/cpu/rows.h"

namespace moire::cpu {

// Columns first ... end - 1 of a block's rows; a grad_scale takes all of them.
struct BiasBlock {
  const BiasBackwardArgs* args;
  RowBlock block;
  int64_t first, end;
  float* partial;  // [n], overwritten; null without grad_bias
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

// The two steps of a grad_bias, for who has the rows in its caches anyhow. The partial sums of
// columns first ... end - 1 of a group's blocks of 32 rows, which `rows` are; and, when all are
// there, their sums.
void sum_bias_rows(const BiasBackwardArgs& args, RowBlock rows, int64_t first, int64_t end);
void finish_bias(const Context& context, const BiasBackwardArgs& args);

}  // namespace moire::cpu
