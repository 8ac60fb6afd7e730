// Packing: transposing rows into panels (or panels of columns into rows), and copying rows into
// panels. Highway per-target inline header.
#if defined(MOIRE_BACKEND_CPU_GEMM_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_BACKEND_CPU_GEMM_PACK_INL_H_
#undef MOIRE_BACKEND_CPU_GEMM_PACK_INL_H_
#else
#define MOIRE_BACKEND_CPU_GEMM_PACK_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "backend/cpu/gemm/micro_kernel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::gemm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Vectors of 8, or of 4 where 128 bits are all there is.
using TransposeTag = hn::CappedTag<float, 8>;
inline constexpr int64_t kTransposeLanes = static_cast<int64_t>(hn::MaxLanes(TransposeTag()));

#if HWY_TARGET != HWY_SCALAR

// Columns c ... c + 3 of kTransposeLanes rows. With 8 lanes rows 4 to 7 are loaded into the upper
// halves, which makes the transpose one of 4 x 4 in each half.
HWY_INLINE void Transpose4Columns(const float* const* rows, int64_t c, float* HWY_RESTRICT target,
                                  int64_t pitch) {
  const TransposeTag d;
  const hn::RepartitionToWide<TransposeTag> d64;
  const auto load = [&](int r) HWY_ATTR {
    if constexpr (kTransposeLanes == 8) {
      const hn::Half<TransposeTag> half;
      return hn::Combine(d, hn::LoadU(half, rows[r + 4] + c), hn::LoadU(half, rows[r] + c));
    } else {
      return hn::LoadU(d, rows[r] + c);
    }
  };
  const auto r0 = load(0), r1 = load(1), r2 = load(2), r3 = load(3);
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, low01, low23)), d, target + c * pitch);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23)), d, target + (c + 1) * pitch);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, high01, high23)), d, target + (c + 2) * pitch);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23)), d, target + (c + 3) * pitch);
}

#endif

inline void Transpose(const float* const* rows, int64_t num_rows, int64_t num_columns,
                      float* HWY_RESTRICT target, int64_t pitch) {
  for (int64_t r = 0; r < num_rows; r += kTransposeLanes) {
    int64_t c = 0;
#if HWY_TARGET != HWY_SCALAR
    for (; c + 4 <= num_columns; c += 4) Transpose4Columns(rows + r, c, target + r, pitch);
#endif
    for (; c < num_columns; ++c) {
      for (int64_t i = 0; i < kTransposeLanes; ++i) target[c * pitch + r + i] = rows[r + i][c];
    }
  }
}

// kVectors full vectors of each row.
template <int kVectors>
HWY_INLINE void CopyPanel(const float* const* rows, int64_t num_rows, int64_t column,
                          float* HWY_RESTRICT panel) {
  const FloatTag d;
  for (int64_t r = 0; r < num_rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(hn::LoadU(d, rows[r] + column + v * kLanes), d, panel);
      panel += kLanes;
    }
  }
}

inline void CopyToPanels(const float* const* rows, int64_t k, int64_t num_rows, int64_t kc,
                         int64_t num_columns, float* HWY_RESTRICT panels) {
  int64_t column = 0;
  for (; column + kPanelWidth <= num_columns; column += kPanelWidth) {
    CopyPanel<kMicroVectors>(rows, num_rows, column, panels + column * kc + k * kPanelWidth);
  }
  const int64_t rest = num_columns - column;
  if (rest == 0) return;
  const int64_t width = (rest + kLanes - 1) / kLanes * kLanes;
  float* HWY_RESTRICT panel = panels + column * kc + k * width;
  for (int64_t r = 0; r < num_rows; ++r, panel += width) {
    std::memcpy(panel, rows[r] + column, static_cast<size_t>(rest) * sizeof(float));
    std::fill(panel + rest, panel + width, 0.0F);
  }
}

}  // namespace moire::cpu::gemm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
