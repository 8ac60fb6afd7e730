// What the epilogues that quantise share: finished rows, collected in blocks of kQuantizedRows, on
// their way to the quantised copies of an output. Include after simd_targets.h, inside the
// foreach_target pattern.
#include "backend/cpu/quantize_block-inl.h"

#if defined(MOIRE_GEMM_QUANTIZE_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_GEMM_QUANTIZE_SUMS_INL_H_
#undef MOIRE_GEMM_QUANTIZE_SUMS_INL_H_
#else
#define MOIRE_GEMM_QUANTIZE_SUMS_INL_H_
#endif

#include <algorithm>
#include <atomic>

#include "backend/cpu/gemm/engine.h"
#include "backend/cpu/gemm/quantized_output.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {

// Up to gemm::kQuantizedRows rows of FP32 values on their way to a quantised output.
template <size_t kColumns>
struct ValueBlock {
  float* row(int64_t i) { return values + i * static_cast<int64_t>(kColumns); }
  alignas(64) float values[gemm::kQuantizedRows * kColumns];
};

// Which rows of an output a block holds.
struct BlockRows {
  int64_t group, first_in_group;
  int64_t first, count;
};

// Calls run(rows) for blocks of the sums' rows.
template <class Run>
HWY_INLINE void for_each_row_block(const gemm::Sums& s, const moire_groups& groups, Run&& run) {
  for (int64_t r = 0; r < s.rows; r += gemm::kQuantizedRows) {
    const int64_t first = s.first_row + r;
    run(BlockRows{s.group, first - groups.offsets[s.group], first,
                  std::min(gemm::kQuantizedRows, s.rows - r)});
  }
}

inline QuantizedPiece piece_of(const moire_quantized& q, const BlockRows& rows, int64_t column,
                               int64_t scale_row, int64_t scale_column,
                               std::atomic<bool>* non_finite) {
  if (!is_present(q)) return {};
  const TensorView data(q.data), scales(q.scales);
  return {reinterpret_cast<uint8_t*>(gemm::element(data, rows.first, column)),
          data.stride(),
          gemm::element(scales, scale_row, scale_column),
          scales.stride(),
          false,
          non_finite};
}

// Columns [column, column + n) of a block of rows, whose values are rounded to their storage type.
inline void QuantizeRows(const gemm::QuantizedOutput& out, const moire_groups& groups,
                         const BlockRows& rows, const float* values, int64_t pitch, int64_t column,
                         int64_t n) {
  const auto format = [](const moire_quantized& q) {
    return QuantizeFormat{static_cast<DType>(q.data.dtype), MOIRE_SCALING_MXFP8, false};
  };
  const int64_t block = groups.offsets[rows.group] / gemm::kQuantizedRows + rows.group +
                        rows.first_in_group / gemm::kQuantizedRows;
  std::atomic<bool> found = false;
  QuantizeBlock(
      format(out.rowwise()), values, pitch, rows.count, n,
      piece_of(out.rowwise(), rows, column, rows.first, column / gemm::kQuantizedRows, &found), {});
  QuantizeBlock(format(out.columnwise()), values, pitch, rows.count, n, {},
                piece_of(out.columnwise(), rows, column, block, column, &found));
  if (found) out.note_non_finite(values, pitch, rows.first, rows.count, column, n);
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
