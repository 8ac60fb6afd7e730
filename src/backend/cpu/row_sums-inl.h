// The end of a sum over the rows of a group (core/row_sums.h): of its blocks, and into the bias'
// gradient. Columns are independent, so any part of the columns may be done at a time. An epilogue
// that makes grad_z keeps a sum for each block in workspace, at RowBlocks' index times its columns;
// one task, or tasks that follow each other, must make all of a block, of which no run is cut.
#include "backend/cpu/convert-inl.h"

#if defined(MOIRE_ROW_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_ROW_SUMS_INL_H_
#undef MOIRE_ROW_SUMS_INL_H_
#else
#define MOIRE_ROW_SUMS_INL_H_
#endif

#include <algorithm>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {

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
