// FP8 codes and scales of blocks down columns, two passes over the rows: the first finds the
// largest absolute value of each column, the second encodes. Include after simd_targets.h, inside
// the foreach_target pattern.
#include "backend/cpu/quantize_bf16_columns-inl.h"

#if defined(MOIRE_QUANTIZE_COLUMNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_COLUMNS_INL_H_
#undef MOIRE_QUANTIZE_COLUMNS_INL_H_
#else
#define MOIRE_QUANTIZE_COLUMNS_INL_H_
#endif

#include <algorithm>
#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// amax[i] = the bits of the largest absolute value of column i, from lane i to the last whole
// vector before `columns`; returns where it ended.
template <bool kSkipsNan, int64_t kRows, class Rows, class D>
HWY_INLINE int64_t AddToColumnAmax(D d, const Rows& rows, int64_t r, int64_t i, int64_t columns,
                                   int32_t* HWY_RESTRICT amax) {
  using Source = typename Rows::Format;
  const hn::RebindToSigned<D> di;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + lanes <= columns; i += lanes) {
    auto largest = hn::LoadU(di, amax + i);
    for (int64_t j = 0; j < kRows; ++j) {
      const auto* const p = rows.row(r + j) + i;
      rows.prefetch(p);
      largest = hn::Max(largest, Magnitude<Source, kSkipsNan>(d, p));
    }
    hn::StoreU(largest, di, amax + i);
  }
  return i;
}
template <bool kSkipsNan, int64_t kRows, class Rows>
HWY_INLINE void AddToColumnAmax(const Rows& rows, int64_t r, int64_t columns, int32_t* amax) {
  const hn::CappedTag<float, 1> one;
  const int64_t i = AddToColumnAmax<kSkipsNan, kRows>(FloatTag(), rows, r, 0, columns, amax);
  AddToColumnAmax<kSkipsNan, kRows>(one, rows, r, i, columns, amax);
}
template <bool kSkipsNan, class Rows>
HWY_INLINE void FindColumnAmax(const Rows& rows, int64_t num_rows, int64_t columns, int32_t* amax) {
  std::fill(amax, amax + columns, 0);
  int64_t r = 0;
  for (; r + kRowsPerPass <= num_rows; r += kRowsPerPass) {
    AddToColumnAmax<kSkipsNan, kRowsPerPass>(rows, r, columns, amax);
  }
  for (; r < num_rows; ++r) AddToColumnAmax<kSkipsNan, 1>(rows, r, columns, amax);
}

template <class Format, bool kFinite, class Rows, class D>
HWY_INLINE int64_t EncodeColumnVectors(D d, const Rows& rows, int64_t r, int64_t i, int64_t columns,
                                       const float* HWY_RESTRICT multipliers,
                                       uint8_t* HWY_RESTRICT codes) {
  const auto* const p = rows.row(r);
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + lanes <= columns; i += lanes) {
    const auto v = hn::Mul(Rows::Format::Load(d, p + i), hn::LoadU(d, multipliers + i));
    EncodeVector<Format, kFinite>(d, v, codes + i);
  }
  return i;
}
template <class Format, bool kFinite, class Rows>
HWY_INLINE void EncodeColumns(const Rows& rows, int64_t num_rows, int64_t columns,
                              const float* multipliers, const QuantizedPiece& out) {
  const hn::CappedTag<float, 4> d4;
  const hn::CappedTag<float, 1> d1;
  for (int64_t r = 0; r < num_rows; ++r) {
    uint8_t* const codes = out.data + r * out.stride;
    int64_t i =
        EncodeColumnVectors<Format, kFinite>(FloatTag(), rows, r, 0, columns, multipliers, codes);
    i = EncodeColumnVectors<Format, kFinite>(d4, rows, r, i, columns, multipliers, codes);
    EncodeColumnVectors<Format, kFinite>(d1, rows, r, i, columns, multipliers, codes);
  }
}

template <class Scaling, class D>
HWY_INLINE int64_t ScaleColumns(D d, const Scaling& scaling, const int32_t* amax, int64_t i,
                                int64_t columns, typename Scaling::Scale::Element* scales,
                                float* multipliers) {
  const hn::RebindToSigned<D> di;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + lanes <= columns; i += lanes) {
    const auto largest = hn::BitCast(d, hn::LoadU(di, amax + i));
    hn::StoreU(scaling.Store(d, largest, scales + i), d, multipliers + i);
  }
  return i;
}

// At most kColumnBatch columns of one block of rows.
template <class Format, class Scaling, class Rows>
inline void QuantizeColumnBatch(const Scaling& scaling, const Rows& rows, int64_t num_rows,
                                int64_t columns, const QuantizedPiece& out) {
  if constexpr (std::is_same_v<typename Rows::Format, Bf16>) {
    if (scaling.is_power_of_two() &&
        QuantizeBf16ColumnBatch<Format>(scaling, rows, num_rows, columns, out)) {
      return;
    }
  }
  alignas(64) int32_t amax[kColumnBatch] = {};  // GCC 13 does not see that all of them are found
  alignas(64) float multipliers[kColumnBatch];
  FindColumnAmax<false>(rows, num_rows, columns, amax);
  const bool is_finite = *std::max_element(amax, amax + columns) < kInfinityBits;
  if (!is_finite) FindColumnAmax<true>(rows, num_rows, columns, amax);
  auto* const scales = static_cast<typename Scaling::Scale::Element*>(out.scales);
  const hn::CappedTag<float, 1> one;
  const int64_t i = ScaleColumns(FloatTag(), scaling, amax, 0, columns, scales, multipliers);
  ScaleColumns(one, scaling, amax, i, columns, scales, multipliers);
  if (is_finite) {
    EncodeColumns<Format, true>(rows, num_rows, columns, multipliers, out);
  } else {
    out.note_non_finite();
    EncodeColumns<Format, false>(rows, num_rows, columns, multipliers, out);
  }
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
