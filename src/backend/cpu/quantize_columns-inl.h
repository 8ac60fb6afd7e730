// FP8 codes and scales of blocks down columns, two passes over the rows: the first finds the
// largest magnitude of each column, the second encodes. Include after simd_targets.h, inside the
// foreach_target pattern.
#include "backend/cpu/quantize_floats-inl.h"
#include "backend/cpu/quantize_maxima-inl.h"
#include "backend/cpu/quantize_quick-inl.h"

#if defined(MOIRE_QUANTIZE_COLUMNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_COLUMNS_INL_H_
#undef MOIRE_QUANTIZE_COLUMNS_INL_H_
#else
#define MOIRE_QUANTIZE_COLUMNS_INL_H_
#endif

#include <algorithm>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Columns whose scales are computed together: rows are read and written that far at a time.
inline constexpr int64_t kColumnBatch = 1024;

// At most kColumnBatch columns of one block of rows.
template <class Format, class Scaling, class Rows>
inline void QuantizeColumnBatch(const Scaling& scaling, const Rows& rows, int64_t num_rows,
                                int64_t columns, const QuantizedPiece& out) {
  using Source = typename Rows::Format;
  alignas(64) BitsOf<Source> amax[kColumnBatch];
  alignas(64) float multipliers[kColumnBatch];
  const auto store_scales = [&]() HWY_ATTR {
    auto* const scales = static_cast<typename Scaling::Scale::Element*>(out.scales);
    return StoreScales<Source>(scaling, amax, columns, scales, multipliers);
  };
  FindColumnAmax<false>(rows, num_rows, columns, amax);
  const BlockKinds kinds = store_scales();
  if (kinds.are_quick && scaling.is_power_of_two()) {
    alignas(64) uint16_t subnormal[kColumnBatch];
    FindLargestSubnormals<Format>(multipliers, columns, subnormal);
    EncodeQuickColumns<Format>(rows, num_rows, columns, subnormal, out);
    return;
  }
  if (!kinds.are_finite) {
    FindColumnAmax<true>(rows, num_rows, columns, amax);
    store_scales();
  }
  EncodeColumns<Format>(rows, num_rows, columns, multipliers, kinds.are_finite, out);
}

template <class Format, class Scaling, class Rows>
inline void QuantizeDownColumns(const Scaling& scaling, const Rows& rows, int64_t num_rows,
                                int64_t columns, const QuantizedPiece& out) {
  using Scale = typename Scaling::Scale::Element;
  for (int64_t c = 0; c < columns; c += kColumnBatch) {
    QuantizedPiece batch = out;
    batch.data += c;
    batch.scales = static_cast<Scale*>(out.scales) + c;
    QuantizeColumnBatch<Format>(scaling, advanced(rows, c), num_rows,
                                std::min(kColumnBatch, columns - c), batch);
  }
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
