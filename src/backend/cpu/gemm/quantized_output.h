// The quantised copies of an output of a GEMM with an activation. Those whose blocks lie inside the
// rows and columns that an epilogue sees at once are made there; the others are made from the
// stored tensor after the product. The bytes are the same (quantize_block-inl.h makes both).
#pragma once

#include <moire/context.h>
#include <moire/groups.h>
#include <moire/tensor.h>

#include <atomic>
#include <limits>
#include <string>

#include "core/glu_layout.h"

namespace moire::cpu::gemm {

// Rows that an epilogue sees at once where it quantises, from the group's first row: an MXFP8
// block.
inline constexpr int64_t kQuantizedRows = 32;

class QuantizedOutput {
 public:
  // `straddles`: blocks along the rows do not lie inside an epilogue's columns.
  QuantizedOutput(const moire_quantized& rowwise, const moire_quantized& columnwise,
                  bool fractional_scales, bool straddles);

  // What the epilogue makes; absent ones have no data.
  const moire_quantized& rowwise() const { return fused_[0]; }
  const moire_quantized& columnwise() const { return fused_[1]; }
  bool is_fused() const { return is_present(fused_[0]) || is_present(fused_[1]); }
  // Whether the stored tensor is needed.
  bool is_deferred() const { return is_present(deferred_[0]) || is_present(deferred_[1]); }

  // An epilogue quantised this block of the output, which has infinities or NaN.
  void note_non_finite(const float* values, int64_t pitch, int64_t first_row, int64_t rows,
                       int64_t first_column, int64_t columns) const;

  // After the product: what the epilogue left, the tails, and what was found, which is said of
  // `origin`.
  Status finish(const Context& context, const Context::Origin& origin, const TensorView& stored,
                const Groups& groups, int32_t tail) const;
  // ", act quantised rowwise in the epilogue"; nothing without copies.
  std::string policy(std::string_view name) const;

 private:
  int64_t width() const { return TensorView(fused_[is_present(fused_[0]) ? 0 : 1].data).columns(); }

  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  moire_quantized fused_[2] = {}, deferred_[2] = {};  // rowwise, columnwise
  bool fractional_ = false;
  // row * width + column of the first element that is infinite or NaN, whichever thread met it.
  mutable std::atomic<int64_t> non_finite_ = kNone;
};

// Whether blocks of 32 columns of a row of 2F lie inside the positions of 64 gates and their ups.
inline bool straddles_blocks(const ResolvedGluLayout& layout) {
  return layout.is_gated && layout.block % 32 != 0 && 64 % layout.block != 0;
}

}  // namespace moire::cpu::gemm
