// Sums over the rows of a group (bias gradients) in the one order that the contract has, whatever
// computes the rows:
//   1. for each block of 32 rows from the group's first row (row_blocks.h), a partial sum per
//      column: one FMA chain from zero, p = fma(scale_i, y_i, p), rows ascending;
//   2. the group's sum: s = 0, then s = s + p for its blocks, ascending;
//   3. grad_bias = s, or grad_bias + s where it accumulates, rounded once.
// Columns are independent, so any part of the columns may be done at a time. An epilogue that makes
// grad_z gets the bits of bias_backward so: per 32-row block it keeps `partial` in workspace, at
// RowBlocks' index times 2F, zeroes it, calls AddRow with scale 1 for each row of the block in
// ascending order (with grad_z rounded to its storage type), and after all blocks of the group
// calls SumPartials and StoreBiasGradient. A 32-row block must therefore be made by one task, or by
// tasks that follow each other.
#include "backend/cpu/convert-inl.h"

#if defined(MOIRE_ROW_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_ROW_SUMS_INL_H_
#undef MOIRE_ROW_SUMS_INL_H_
#else
#define MOIRE_ROW_SUMS_INL_H_
#endif

#include <algorithm>
#include <cmath>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {

// partial_j = fma(scale, row_j, partial_j) for n columns.
inline void AddRow(const float* HWY_RESTRICT row, float scale, size_t n,
                   float* HWY_RESTRICT partial) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  const auto s = hn::Set(d, scale);
  size_t j = 0;
  for (; j + lanes <= n; j += lanes) {
    const auto p = hn::LoadU(d, partial + j);
    hn::StoreU(hn::MulAdd(s, hn::LoadU(d, row + j), p), d, partial + j);
  }
  for (; j < n; ++j) partial[j] = std::fma(scale, row[j], partial[j]);
}

// sum_j = 0 + partials[0][j] + partials[1][j] + ..., `pitch` floats from one partial to the next.
inline void SumPartials(const float* HWY_RESTRICT partials, int64_t count, int64_t pitch, size_t n,
                        float* HWY_RESTRICT sum) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  std::fill_n(sum, n, 0.0F);
  for (int64_t i = 0; i < count; ++i) {
    const float* partial = partials + i * pitch;
    size_t j = 0;
    for (; j + lanes <= n; j += lanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, sum + j), hn::LoadU(d, partial + j)), d, sum + j);
    }
    for (; j < n; ++j) sum[j] += partial[j];
  }
}

// Columns first ... first + n - 1 of one group's bias gradient; `row` is its start.
inline void StoreBiasGradient(float* sum, int64_t first, size_t n, bool accumulate, DType dtype,
                              void* row) {
  char* const out = static_cast<char*>(row) + first * dtype_size(dtype);
  if (accumulate) {
    constexpr size_t kChunk = 64;
    float old[kChunk];
    for (size_t j = 0; j < n; j += kChunk) {
      const size_t m = std::min(kChunk, n - j);
      DecodeRow(out + static_cast<int64_t>(j) * dtype_size(dtype), dtype, m, old);
      for (size_t i = 0; i < m; ++i) sum[j + i] += old[i];
    }
  }
  EncodeRow(sum, n, dtype, out);
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
