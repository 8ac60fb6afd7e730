// Floats to FP8 codes and scales, a piece of a matrix at a time: the one place that does it, so
// that quantising in an epilogue and quantising the stored tensor give the same bytes. The values
// are what the stored tensor holds: rounded to its type. Include after simd_targets.h, inside the
// foreach_target pattern.
#include "backend/cpu/fp8-inl.h"

#if defined(MOIRE_QUANTIZE_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_BLOCK_INL_H_
#undef MOIRE_QUANTIZE_BLOCK_INL_H_
#else
#define MOIRE_QUANTIZE_BLOCK_INL_H_
#endif

#include <bit>
#include <cstring>

#include "backend/cpu/quantize_block.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// One E8M0 scale per 32 elements: mx_scale() of core/fp8.h.
template <class Format>
struct MxScaling {
  using Scale = E8m0;
  static constexpr int64_t kBlock = 32;

  // The multipliers of Lanes(d) blocks, whose scales are stored.
  template <class D>
  HWY_INLINE hn::VFromD<D> Store(D d, hn::VFromD<D> amax, uint8_t* scales) const {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto t = hn::BitCast(di, hn::Mul(amax, hn::Set(d, 1.0F / Format::Scalar::kMax)));
    // Rounded up to the next exponent, of which 254 is the last; a subnormal t stays at 0 up to the
    // middle.
    const auto next = hn::ShiftRight<23>(hn::Add(t, hn::Set(di, 0x7FFFFF)));
    const auto is_small = hn::Gt(hn::Set(di, 0x400001), t);
    const auto code = hn::IfThenZeroElse(is_small, hn::Min(next, hn::Set(di, 254)));
    StoreBytes(d, hn::BitCast(du, code), scales);
    const auto power = hn::ShiftLeft<23>(hn::Sub(hn::Set(di, 254), code));
    return hn::BitCast(d, hn::Max(power, hn::Set(di, 0x00400000)));
  }
};

// One FP32 scale per 128 elements, or per tile: block_scale() of core/fp8.h.
template <class Format>
struct BlockScaling {
  using Scale = Fp32;
  static constexpr int64_t kBlock = 128;
  bool fractional = false;

  float store(float amax, float* scale) const {
    const BlockScale s = block_scale<typename Format::Scalar>(amax, fractional);
    *scale = s.scale;
    return s.multiplier;
  }
  template <class D>
  HWY_INLINE hn::VFromD<D> Store(D d, hn::VFromD<D> amax, float* scales) const {
    const hn::RebindToSigned<D> di;
    const auto one = hn::Set(d, 1.0F);
    const auto bits = hn::BitCast(di, amax);
    const auto is_sound =
        hn::And(hn::Gt(bits, hn::Zero(di)), hn::Lt(bits, hn::Set(di, 0x7F800000)));
    const auto divisor = hn::IfThenElse(hn::RebindMask(d, is_sound), amax, one);
    const auto quotient = hn::BitCast(di, hn::Div(hn::Set(d, Format::Scalar::kMax), divisor));
    auto s = hn::Min(quotient, hn::Set(di, 0x7F7FFFFF));
    if (!fractional) s = hn::And(s, hn::Set(di, 0x7F800000));
    const auto multiplier = hn::IfThenElse(hn::RebindMask(d, is_sound), hn::BitCast(d, s), one);
    hn::StoreU(hn::Div(one, multiplier), d, scales);
    return multiplier;
  }
};

template <class D>
using SignedOf = hn::VFromD<hn::RebindToSigned<D>>;

// The bits of |x|, which order as the values do; NaN counts as zero where kSkipsNan.
template <bool kSkipsNan, class D>
HWY_INLINE SignedOf<D> Magnitude(D d, const float* p) {
  const hn::RebindToSigned<D> di;
  const auto bits = hn::And(hn::BitCast(di, hn::LoadU(d, p)), hn::Set(di, 0x7FFFFFFF));
  if constexpr (!kSkipsNan) return bits;
  return hn::IfThenZeroElse(hn::Gt(bits, hn::Set(di, 0x7F800000)), bits);
}

// The bits of the largest absolute value of n elements.
template <bool kSkipsNan>
HWY_INLINE int32_t RunAmax(const float* p, int64_t n) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto amax = hn::Zero(di);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) amax = hn::Max(amax, Magnitude<kSkipsNan>(d, p + i));
  int32_t out = hn::GetLane(hn::MaxOfLanes(di, amax));
  const hn::CappedTag<float, 1> one;
  for (; i < n; ++i) out = std::max(out, hn::GetLane(Magnitude<kSkipsNan>(one, p + i)));
  return out;
}

// What elements that share a scale have to be encoded with: all are finite, or some are not.
inline constexpr int32_t kInfinityBits = 0x7F800000;
struct Amax {
  float value;
  bool is_finite;
};
HWY_INLINE Amax FindAmax(const float* p, int64_t n) {
  const int32_t bits = RunAmax<false>(p, n);
  if (bits < kInfinityBits) return {std::bit_cast<float>(bits), true};
  return {std::bit_cast<float>(RunAmax<true>(p, n)), false};
}

// Finite values of a block are never scaled past what rounds to the largest code.
template <class Format, bool kFinite, class D>
HWY_INLINE void EncodeVector(D d, hn::VFromD<D> v, uint8_t* code) {
  if constexpr (kFinite) {
    Format::StoreLowByte(d, v, code);
  } else {
    Format::Store(d, v, code);
  }
}

template <class Format, bool kFinite, class D>
HWY_INLINE int64_t EncodeVectors(D d, const float* p, float multiplier, int64_t i, int64_t n,
                                 uint8_t* codes) {
  const auto factor = hn::Set(d, multiplier);
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + lanes <= n; i += lanes) {
    EncodeVector<Format, kFinite>(d, hn::Mul(hn::LoadU(d, p + i), factor), codes + i);
  }
  return i;
}
template <class Format, bool kFinite>
HWY_INLINE void EncodeRun(const float* p, int64_t n, float multiplier, uint8_t* codes) {
  int64_t i = EncodeVectors<Format, kFinite>(FloatTag(), p, multiplier, 0, n, codes);
  i = EncodeVectors<Format, kFinite>(hn::CappedTag<float, 4>(), p, multiplier, i, n, codes);
  EncodeVectors<Format, kFinite>(hn::CappedTag<float, 1>(), p, multiplier, i, n, codes);
}
template <class Format>
HWY_INLINE void EncodeRun(const float* p, int64_t n, float multiplier, bool is_finite,
                          uint8_t* codes) {
  if (is_finite) {
    EncodeRun<Format, true>(p, n, multiplier, codes);
  } else {
    EncodeRun<Format, false>(p, n, multiplier, codes);
  }
}

// Blocks whose scales are computed together.
inline constexpr int64_t kScaleBatch = 128;

// Rows in blocks from their first element on, at most kScaleBatch blocks in all; the last of a row
// may be short.
template <class Format, class Scaling>
inline void QuantizeRowBatch(const Scaling& scaling, const float* values, int64_t pitch,
                             int64_t rows, int64_t columns, const QuantizedPiece& out) {
  using Scale = typename Scaling::Scale::Element;
  constexpr int64_t kBlock = Scaling::kBlock;
  const FloatTag d;
  alignas(64) float amax[kScaleBatch], multipliers[kScaleBatch];
  alignas(64) Scale scales[kScaleBatch];
  bool is_finite[kScaleBatch];
  const int64_t per_row = (columns + kBlock - 1) / kBlock, count = rows * per_row;
  for (int64_t r = 0, i = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; c += kBlock, ++i) {
      const Amax found = FindAmax(values + r * pitch + c, std::min(kBlock, columns - c));
      amax[i] = found.value;
      is_finite[i] = found.is_finite;
    }
  }
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  std::fill(amax + count, amax + (count + lanes - 1) / lanes * lanes, 0.0F);
  for (int64_t i = 0; i < count; i += lanes) {
    hn::Store(scaling.Store(d, hn::Load(d, amax + i), scales + i), d, multipliers + i);
  }
  for (int64_t r = 0, i = 0; r < rows; ++r) {
    std::memcpy(static_cast<Scale*>(out.scales) + r * out.scale_stride, scales + i,
                static_cast<size_t>(per_row) * sizeof(Scale));
    for (int64_t c = 0; c < columns; c += kBlock, ++i) {
      EncodeRun<Format>(values + r * pitch + c, std::min(kBlock, columns - c), multipliers[i],
                        is_finite[i], out.data + r * out.stride + c);
    }
  }
}

template <class Format, class Scaling>
inline void QuantizeRows(const Scaling& scaling, const float* values, int64_t pitch, int64_t rows,
                         int64_t columns, const QuantizedPiece& out) {
  using Scale = typename Scaling::Scale::Element;
  constexpr int64_t kColumns = kScaleBatch * Scaling::kBlock;
  for (int64_t c = 0; c < columns; c += kColumns) {
    const int64_t n = std::min(kColumns, columns - c);
    const int64_t per_row = (n + Scaling::kBlock - 1) / Scaling::kBlock;
    const int64_t batch = kScaleBatch / per_row;
    for (int64_t r = 0; r < rows; r += batch) {
      const QuantizedPiece piece{
          out.data + r * out.stride + c, out.stride,
          static_cast<Scale*>(out.scales) + r * out.scale_stride + c / Scaling::kBlock,
          out.scale_stride};
      QuantizeRowBatch<Format>(scaling, values + r * pitch + c, pitch, std::min(batch, rows - r), n,
                               piece);
    }
  }
}

template <bool kSkipsNan, class D>
HWY_INLINE SignedOf<D> ColumnAmax(D d, const float* p, int64_t pitch, int64_t rows) {
  auto amax = hn::Zero(hn::RebindToSigned<D>());
  for (int64_t r = 0; r < rows; ++r) amax = hn::Max(amax, Magnitude<kSkipsNan>(d, p + r * pitch));
  return amax;
}

template <class Format, bool kFinite, class D>
HWY_INLINE void EncodeColumns(D d, const float* p, int64_t pitch, int64_t rows,
                              hn::VFromD<D> multiplier, uint8_t* codes, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    EncodeVector<Format, kFinite>(d, hn::Mul(hn::LoadU(d, p + r * pitch), multiplier),
                                  codes + r * stride);
  }
}

// Columns i ... of one block of rows, as many whole vectors as there are; returns where it ended.
template <class Format, class Scaling, class D>
HWY_INLINE int64_t QuantizeColumnVectors(D d, const Scaling& scaling, const float* values,
                                         int64_t pitch, int64_t rows, int64_t i, int64_t columns,
                                         const QuantizedPiece& out) {
  const hn::RebindToSigned<D> di;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto* const scales = static_cast<typename Scaling::Scale::Element*>(out.scales);
  for (; i + lanes <= columns; i += lanes) {
    auto amax = ColumnAmax<false>(d, values + i, pitch, rows);
    const bool is_finite = hn::AllTrue(di, hn::Lt(amax, hn::Set(di, kInfinityBits)));
    if (!is_finite) amax = ColumnAmax<true>(d, values + i, pitch, rows);
    const auto multiplier = scaling.Store(d, hn::BitCast(d, amax), scales + i);
    uint8_t* const codes = out.data + i;
    if (is_finite) {
      EncodeColumns<Format, true>(d, values + i, pitch, rows, multiplier, codes, out.stride);
    } else {
      EncodeColumns<Format, false>(d, values + i, pitch, rows, multiplier, codes, out.stride);
    }
  }
  return i;
}

template <class Format, class Scaling>
inline void QuantizeColumns(const Scaling& scaling, const float* values, int64_t pitch,
                            int64_t rows, int64_t columns, const QuantizedPiece& out) {
  const auto with = [&](auto d, int64_t i) HWY_ATTR {
    return QuantizeColumnVectors<Format>(d, scaling, values, pitch, rows, i, columns, out);
  };
  int64_t i = with(FloatTag(), 0);
  i = with(hn::CappedTag<float, 8>(), i);
  i = with(hn::CappedTag<float, 4>(), i);
  with(hn::CappedTag<float, 1>(), i);
}

// Calls f(format, scaling) with what `how` says.
template <class F>
HWY_INLINE void with_quantize_format(const QuantizeFormat& how, F&& f) {
  with_fp8_format(how.element, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    if (how.scaling == MOIRE_SCALING_MXFP8) {
      f(format, MxScaling<Format>{});
    } else {
      f(format, BlockScaling<Format>{how.fractional});
    }
  });
}

// [rows, columns] of values, `pitch` apart, as one or both copies, each of which may be absent.
// Column 0 starts a block. Row 0 starts a block of columns as well and rows is at most a block,
// where columnwise is present.
inline void QuantizeBlock(const QuantizeFormat& how, const float* values, int64_t pitch,
                          int64_t rows, int64_t columns, const QuantizedPiece& rowwise,
                          const QuantizedPiece& columnwise) {
  with_quantize_format(how, [&](auto format, auto scaling) HWY_ATTR {
    using Format = decltype(format);
    if (rowwise.data != nullptr) {
      QuantizeRows<Format>(scaling, values, pitch, rows, columns, rowwise);
    }
    if (columnwise.data != nullptr && rows != 0) {
      QuantizeColumns<Format>(scaling, values, pitch, rows, columns, columnwise);
    }
  });
}

// [rows, columns] of values, at most 128 each, as one tile: one scale for all of it.
inline void QuantizeTile(const QuantizeFormat& how, const float* values, int64_t pitch,
                         int64_t rows, int64_t columns, const QuantizedPiece& tile) {
  with_fp8_format(how.element, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    const BlockScaling<Format> scaling{how.fractional};
    Amax amax{0, true};
    for (int64_t r = 0; r < rows; ++r) {
      const Amax row = FindAmax(values + r * pitch, columns);
      amax = {std::max(amax.value, row.value), amax.is_finite && row.is_finite};
    }
    const float multiplier = scaling.store(amax.value, static_cast<float*>(tile.scales));
    for (int64_t r = 0; r < rows; ++r) {
      EncodeRun<Format>(values + r * pitch, columns, multiplier, amax.is_finite,
                        tile.data + r * tile.stride);
    }
  });
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
