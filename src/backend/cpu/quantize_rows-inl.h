// FP8 codes and scales of blocks along rows. Include after simd_targets.h, inside the
// foreach_target pattern.
#include "backend/cpu/quantize_bf16_rows-inl.h"

#if defined(MOIRE_QUANTIZE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_ROWS_INL_H_
#undef MOIRE_QUANTIZE_ROWS_INL_H_
#else
#define MOIRE_QUANTIZE_ROWS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The bits of the largest absolute value of n elements.
template <bool kSkipsNan, class Source>
HWY_INLINE int32_t RunAmax(const typename Source::Element* p, int64_t n) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto amax = hn::Zero(di);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) amax = hn::Max(amax, Magnitude<Source, kSkipsNan>(d, p + i));
  int32_t out = hn::GetLane(hn::MaxOfLanes(di, amax));
  const hn::CappedTag<float, 1> one;
  for (const auto *q = p + i, *end = p + n; q < end; ++q) {
    out = std::max(out, hn::GetLane(Magnitude<Source, kSkipsNan>(one, q)));
  }
  return out;
}

// What the elements that share a scale are encoded by; they may all be finite, or not.
struct Amax {
  float value;
  bool is_finite;
};
template <class Source>
HWY_INLINE Amax FindAmax(const typename Source::Element* p, int64_t n) {
  const int32_t bits = RunAmax<false, Source>(p, n);
  if (bits < kInfinityBits) return {std::bit_cast<float>(bits), true};
  return {std::bit_cast<float>(RunAmax<true, Source>(p, n)), false};
}

template <class Format, bool kFinite, class Rows, class D>
HWY_INLINE int64_t EncodeVectors(D d, const Rows& rows, const typename Rows::Format::Element* p,
                                 float multiplier, int64_t i, int64_t n, uint8_t* codes) {
  const auto factor = hn::Set(d, multiplier);
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + lanes <= n; i += lanes) {
    rows.prefetch(p + i);
    EncodeVector<Format, kFinite>(d, hn::Mul(Rows::Format::Load(d, p + i), factor), codes + i);
  }
  return i;
}
template <class Format, bool kFinite, class Rows>
HWY_INLINE void EncodeRun(const Rows& rows, const typename Rows::Format::Element* p, int64_t n,
                          float multiplier, uint8_t* codes) {
  const FloatTag d;
  const hn::CappedTag<float, 4> d4;
  const hn::CappedTag<float, 1> d1;
  int64_t i = EncodeVectors<Format, kFinite>(d, rows, p, multiplier, 0, n, codes);
  i = EncodeVectors<Format, kFinite>(d4, rows, p, multiplier, i, n, codes);
  EncodeVectors<Format, kFinite>(d1, rows, p, multiplier, i, n, codes);
}
template <class Format, class Rows>
HWY_INLINE void EncodeRun(const Rows& rows, int64_t r, int64_t column, int64_t n, float multiplier,
                          bool is_finite, const QuantizedPiece& out) {
  const auto* const p = rows.row(r) + column;
  uint8_t* const codes = out.data + r * out.stride + column;
  if (is_finite) {
    EncodeRun<Format, true>(rows, p, n, multiplier, codes);
  } else {
    out.note_non_finite();
    EncodeRun<Format, false>(rows, p, n, multiplier, codes);
  }
}

// Columns [first, end), which start a block, of rows [begin, begin + count): at most kScaleBatch
// blocks. The last block of a row may be short.
template <class Format, class Scaling, class Rows>
inline void QuantizeRowBatch(const Scaling& scaling, const Rows& rows, int64_t begin, int64_t count,
                             int64_t first, int64_t end, const QuantizedPiece& out) {
  using Scale = typename Scaling::Scale::Element;
  using Source = typename Rows::Format;
  constexpr int64_t kBlock = Scaling::kBlock;
  if constexpr (std::is_same_v<Source, Bf16>) {
    if (scaling.is_power_of_two() && (end - first) % kBlock == 0 &&
        QuantizeBf16RowBatch<Format>(scaling, rows, begin, count, first, end, out)) {
      return;
    }
  }
  const FloatTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  alignas(64) float amax[kScaleBatch], multipliers[kScaleBatch];
  alignas(64) Scale scales[kScaleBatch];
  bool is_finite[kScaleBatch];
  int64_t num = 0;
  for (int64_t r = begin; r < begin + count; ++r) {
    const auto* const p = rows.row(r);
    const auto find = [&](int64_t c, int64_t n) HWY_ATTR {
      const Amax found = FindAmax<Source>(p + c, n);
      amax[num] = found.value;
      is_finite[num++] = found.is_finite;
    };
    int64_t c = first;
    for (; c + kBlock <= end; c += kBlock) find(c, kBlock);  // of a length known when compiling
    if (c < end) find(c, end - c);
  }
  std::fill(amax + num, amax + (num + lanes - 1) / lanes * lanes, 0.0F);
  for (int64_t i = 0; i < num; i += lanes) {
    hn::Store(scaling.Store(d, hn::Load(d, amax + i), scales + i), d, multipliers + i);
  }
  num = 0;
  for (int64_t r = begin; r < begin + count; ++r) {
    auto* row_scales = static_cast<Scale*>(out.scales) + r * out.scale_stride + first / kBlock;
    const auto encode = [&](int64_t c, int64_t n) HWY_ATTR {
      *row_scales++ = scales[num];
      EncodeRun<Format>(rows, r, c, n, multipliers[num], is_finite[num], out);
      ++num;
    };
    int64_t c = first;
    for (; c + kBlock <= end; c += kBlock) encode(c, kBlock);
    if (c < end) encode(c, end - c);
  }
}

template <class Format, class Scaling, class Rows>
inline void QuantizeAlongRows(const Scaling& scaling, const Rows& rows, int64_t num_rows,
                              int64_t columns, const QuantizedPiece& out) {
  constexpr int64_t kColumns = kScaleBatch * Scaling::kBlock;
  const int64_t whole = columns / Scaling::kBlock * Scaling::kBlock;
  const int64_t width = std::max(std::min(whole, kColumns), Scaling::kBlock);
  const int64_t batch = kScaleBatch / (width / Scaling::kBlock);
  for (int64_t r = 0; r < num_rows; r += batch) {
    const int64_t count = std::min(batch, num_rows - r);
    for (int64_t c = 0; c < whole; c += width) {
      QuantizeRowBatch<Format>(scaling, rows, r, count, c, std::min(whole, c + width), out);
    }
  }
  for (int64_t r = 0; whole < columns && r < num_rows; r += kScaleBatch) {
    const int64_t count = std::min(kScaleBatch, num_rows - r);
    QuantizeRowBatch<Format>(scaling, rows, r, count, whole, columns, out);
  }
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
