// Reading FP8 operands: value = data * scale, rounded to FP32. Where the scales of each format and
// direction lie: moire.h at moire_quantized. Without scales a tensor is read as it is.
//
// What FP8 tensor cores read (kEmulated) is not rounded, since they scale sums, and MXFP8 is
// folded: each number is the folded value, and its bound is how far that is from what was folded.
#pragma once

#include <moire.h>

#include "reference/tensor.h"

namespace moire::reference {

// What scales are stored as, and how many elements along a side share one.
inline DType scale_dtype(int32_t scaling) {
  return scaling == MOIRE_SCALING_MXFP8 ? DType::kE8M0 : DType::kFP32;
}
inline int64_t block_of(DType scales) { return scales == DType::kE8M0 ? 32 : 128; }
inline int64_t block_of(int32_t scaling) { return block_of(scale_dtype(scaling)); }

// The first `count` rows of a ragged operand, or rows row_idx[i]; blocks along the columns.
Matrix read_rowwise(const TensorView& t, const TensorView& scales, const TensorView& row_idx,
                    int64_t count, Dot::Factors factors = Dot::Factors::kScaled);
// The rows in use of a ragged operand, gathered if it has no scales; blocks down each group's rows.
Matrix read_columnwise(const TensorView& t, const TensorView& scales, const TensorView& row_idx,
                       const moire_groups& groups, Dot::Factors factors = Dot::Factors::kScaled);
// One group's weights as [out, in]; blocks along the last dimension in memory (MOIRE_ROWWISE), the
// one before it (MOIRE_COLUMNWISE), or tiles (scales in FP32).
Matrix read_weight(const moire_weight& w, const TensorView& scales, int32_t direction,
                   int64_t group, Dot::Factors factors = Dot::Factors::kScaled);

}  // namespace moire::reference
