// FP8 codes and scales of blocks down columns of BF16 numbers (quantize_bf16-inl.h). Include after
// simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/quantize_bf16-inl.h"

#if defined(MOIRE_QUANTIZE_BF16_COLUMNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_BF16_COLUMNS_INL_H_
#undef MOIRE_QUANTIZE_BF16_COLUMNS_INL_H_
#else
#define MOIRE_QUANTIZE_BF16_COLUMNS_INL_H_
#endif

#include <algorithm>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <int64_t kRows, class Rows, class D>
HWY_INLINE int64_t AddToBf16Amax(D d, const Rows& rows, int64_t r, int64_t i, int64_t columns,
                                 uint16_t* HWY_RESTRICT amax) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + lanes <= columns; i += lanes) {
    auto largest = hn::LoadU(d, amax + i);
    for (int64_t j = 0; j < kRows; ++j) {
      const uint16_t* const p = rows.row(r + j) + i;
      rows.prefetch(p);
      largest = hn::Max(largest, Bf16Magnitude(d, hn::LoadU(d, p)));
    }
    hn::StoreU(largest, d, amax + i);
  }
  return i;
}
template <int64_t kRows, class Rows>
HWY_INLINE void AddToBf16Amax(const Rows& rows, int64_t r, int64_t columns, uint16_t* amax) {
  const int64_t i = AddToBf16Amax<kRows>(Bf16Tag(), rows, r, 0, columns, amax);
  AddToBf16Amax<kRows>(hn::CappedTag<uint16_t, 1>(), rows, r, i, columns, amax);
}

// At most kColumnBatch columns of one block of rows. False, and nothing done, where a block has to
// go through floats.
template <class Format, class Scaling, class Rows>
inline bool QuantizeBf16ColumnBatch(const Scaling& scaling, const Rows& rows, int64_t num_rows,
                                    int64_t columns, const QuantizedPiece& out) {
  const Bf16Tag d;
  const hn::CappedTag<uint16_t, 1> one;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  alignas(64) uint16_t amax[kColumnBatch], subnormal[kColumnBatch];
  std::fill(amax, amax + columns, uint16_t{0});
  int64_t r = 0;
  for (; r + kRowsPerPass <= num_rows; r += kRowsPerPass) {
    AddToBf16Amax<kRowsPerPass>(rows, r, columns, amax);
  }
  for (; r < num_rows; ++r) AddToBf16Amax<1>(rows, r, columns, amax);
  int64_t i = 0;
  for (; i + lanes <= columns; i += lanes) {
    if (!AreQuick(d, hn::Load(d, amax + i))) return false;
  }
  for (; i < columns; ++i) {
    if (!AreQuick(one, hn::LoadU(one, amax + i))) return false;
  }
  StoreQuickScales<Format>(scaling, amax, columns,
                           static_cast<typename Scaling::Scale::Element*>(out.scales), subnormal);
  for (r = 0; r < num_rows; ++r) {
    const uint16_t* const row = rows.row(r);
    uint8_t* const codes = out.data + r * out.stride;
    const auto store = [&](auto tag, int64_t c) HWY_ATTR {
      Bf16Codes<Format>::Store(tag, row + c, hn::LoadU(tag, subnormal + c), out.bypasses_cache,
                               codes + c);
    };
    i = 0;
    for (; i + lanes <= columns; i += lanes) store(d, i);
    for (; i < columns; ++i) store(one, i);
  }
  return true;
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
