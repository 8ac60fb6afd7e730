// Rows of FP8 as floats, with their scales: DecodeBlocks where blocks of columns share one (rowwise
// operands, tiles), DecodeColumns where each column has its own (columnwise operands). Include
// after simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/fp8-inl.h"

#if defined(MOIRE_FP8_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_FP8_ROWS_INL_H_
#undef MOIRE_FP8_ROWS_INL_H_
#else
#define MOIRE_FP8_ROWS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Whole vectors of the codes from i on, times `factor`; where these are numbers, the factor has
// Format::kNumberScale in it. Returns where it stopped.
template <class Format, bool kAreNumbers, class D>
HWY_INLINE size_t DecodeVectors(D d, const uint8_t* src, float factor, size_t i, size_t n,
                                float* dst) {
  const auto factors = hn::Set(d, factor);
  for (; i + hn::Lanes(d) <= n; i += hn::Lanes(d)) {
    hn::VFromD<D> v;
    if constexpr (kAreNumbers) {
      v = Format::LoadNumbers(d, src + i);
    } else {
      v = Format::Load(d, src + i);
    }
    hn::StoreU(hn::Mul(v, factors), d, dst + i);
  }
  return i;
}

// The same from the first code on, in vectors of every width down to four.
template <class Format, bool kAreNumbers>
HWY_INLINE size_t DecodeWidths(const uint8_t* src, float factor, size_t n, float* dst) {
  size_t i = DecodeVectors<Format, kAreNumbers>(FloatTag(), src, factor, 0, n, dst);
  i = DecodeVectors<Format, kAreNumbers>(hn::CappedTag<float, 8>(), src, factor, i, n, dst);
  return DecodeVectors<Format, kAreNumbers>(hn::CappedTag<float, 4>(), src, factor, i, n, dst);
}

// n elements that share a scale.
template <class Format>
HWY_INLINE void DecodeBlock(const uint8_t* src, float scale, size_t n, float* dst) {
  const float factor = scale * Format::kNumberScale;
  const bool are_numbers =
      std::fabs(factor) <= std::numeric_limits<float>::max() && Format::AreNumbers(src, n);
  size_t i = are_numbers ? DecodeWidths<Format, true>(src, factor, n, dst)
                         : DecodeWidths<Format, false>(src, scale, n, dst);
  for (; i < n; ++i) dst[i] = Format::decode(src[i]) * scale;
}

// Columns first ... first + n - 1 of a row, of which kBlock columns share a scale: `row` and
// `scales` are those of column 0. MXFP8 rows: kBlock 32 and E8m0; FP8_BLOCK rows and tiles: 128 and
// Fp32.
template <class Format, class Scale, int64_t kBlock>
HWY_INLINE void DecodeBlocks(const uint8_t* row, const typename Scale::Element* scales,
                             int64_t first, int64_t n, float* dst) {
  for (int64_t i = 0; i < n;) {
    const int64_t column = first + i;
    const int64_t length = std::min(kBlock - column % kBlock, n - i);
    DecodeBlock<Format>(row + column, Scale::decode(scales[column / kBlock]),
                        static_cast<size_t>(length), dst + i);
    i += length;
  }
}

// Rows of codes that share a row of scales, a scale for each column.
struct ColumnScaledRows {
  const uint8_t* codes;  // of the first row
  int64_t stride, count;
};

template <class Format, class Scale, class D>
HWY_INLINE int64_t DecodeColumnVectors(D d, const ColumnScaledRows& rows,
                                       const typename Scale::Element* scales, int64_t i, int64_t n,
                                       float* HWY_RESTRICT dst) {
  const hn::Rebind<uint8_t, D> d8;
  const auto magnitude = hn::Set(d8, uint8_t{0x7F});
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + lanes <= n; i += lanes) {
    const auto scale = Scale::Load(d, scales + i);
    const auto factor = hn::Mul(scale, hn::Set(d, Format::kNumberScale));
    auto largest = hn::Zero(d8);
    for (int64_t r = 0; r < rows.count; ++r) {
      const uint8_t* const codes = rows.codes + r * rows.stride + i;
      largest = hn::Max(largest, hn::And(hn::LoadU(d8, codes), magnitude));
      hn::StoreU(hn::Mul(Format::LoadNumbers(d, codes), factor), d, dst + r * n + i);
    }
    if (HWY_LIKELY(Format::AreNumbers(d8, largest) && hn::AllTrue(d, hn::IsFinite(factor)))) {
      continue;
    }
    for (int64_t r = 0; r < rows.count; ++r) {
      const auto v = Format::Load(d, rows.codes + r * rows.stride + i);
      hn::StoreU(hn::Mul(v, scale), d, dst + r * n + i);
    }
  }
  return i;
}

// Columns first ... first + n - 1, each with its own scale; the rows of dst are n apart.
template <class Format, class Scale>
HWY_INLINE void DecodeColumns(const ColumnScaledRows& rows, const typename Scale::Element* scales,
                              int64_t first, int64_t n, float* dst) {
  const hn::CappedTag<float, 8> d8;
  const hn::CappedTag<float, 4> d4;
  const hn::CappedTag<float, 1> d1;
  const ColumnScaledRows from{rows.codes + first, rows.stride, rows.count};
  scales += first;
  int64_t i = DecodeColumnVectors<Format, Scale>(FloatTag(), from, scales, 0, n, dst);
  i = DecodeColumnVectors<Format, Scale>(d8, from, scales, i, n, dst);
  i = DecodeColumnVectors<Format, Scale>(d4, from, scales, i, n, dst);
  DecodeColumnVectors<Format, Scale>(d1, from, scales, i, n, dst);
}

// The same for dtypes known at run time. Scales of E8M0 stand for MXFP8, FP32 for FP8_BLOCK and
// tiles; `scales` is the row of the scales that the row belongs to.
inline void DecodeRowwise(const void* row, DType dtype, const void* scales, DType scale_dtype,
                          int64_t first, int64_t n, float* dst) {
  with_fp8_format(dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    const auto* codes = static_cast<const uint8_t*>(row);
    if (scale_dtype == DType::kE8M0) {
      DecodeBlocks<Format, E8m0, 32>(codes, static_cast<const uint8_t*>(scales), first, n, dst);
    } else {
      DecodeBlocks<Format, Fp32, 128>(codes, static_cast<const float*>(scales), first, n, dst);
    }
  });
}
inline void DecodeColumnwiseRows(const ColumnScaledRows& rows, DType dtype, const void* scales,
                                 DType scale_dtype, int64_t first, int64_t n, float* dst) {
  with_fp8_format(dtype, [&](auto format) HWY_ATTR {
    with_scale_format(scale_dtype, [&](auto scale) HWY_ATTR {
      using Scale = decltype(scale);
      const auto* const s = static_cast<const typename Scale::Element*>(scales);
      DecodeColumns<decltype(format), Scale>(rows, s, first, n, dst);
    });
  });
}
inline void DecodeColumnwise(const void* row, DType dtype, const void* scales, DType scale_dtype,
                             int64_t first, int64_t n, float* dst) {
  const ColumnScaledRows rows{static_cast<const uint8_t*>(row), 0, 1};
  DecodeColumnwiseRows(rows, dtype, scales, scale_dtype, first, n, dst);
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
