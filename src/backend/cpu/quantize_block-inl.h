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

  float store(float amax, uint8_t* scale) const {
    *scale = mx_scale<typename Format::Scalar>(amax);
    return e8m0_reciprocal(*scale);
  }
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
HWY_INLINE int32_t RunAmaxBits(const float* p, int64_t n) {
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
HWY_INLINE float RunAmax(const float* p, int64_t n) {
  int32_t amax = RunAmaxBits<false>(p, n);
  if (amax > 0x7F800000) amax = RunAmaxBits<true>(p, n);  // it was a NaN
  return std::bit_cast<float>(amax);
}

template <class Format, class D>
HWY_INLINE int64_t EncodeScaledVectors(D d, const float* p, float multiplier, int64_t i, int64_t n,
                                       uint8_t* codes) {
  const auto factor = hn::Set(d, multiplier);
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + lanes <= n; i += lanes) {
    Format::Store(d, hn::Mul(hn::LoadU(d, p + i), factor), codes + i);
  }
  return i;
}
template <class Format>
HWY_INLINE void EncodeScaled(const float* p, int64_t n, float multiplier, uint8_t* codes) {
  int64_t i = EncodeScaledVectors<Format>(FloatTag(), p, multiplier, 0, n, codes);
  i = EncodeScaledVectors<Format>(hn::CappedTag<float, 4>(), p, multiplier, i, n, codes);
  EncodeScaledVectors<Format>(hn::CappedTag<float, 1>(), p, multiplier, i, n, codes);
}

// One row in blocks from its first element on; the last may be short.
template <class Format, class Scaling>
inline void QuantizeRow(const Scaling& scaling, const float* values, int64_t columns,
                        uint8_t* codes, typename Scaling::Scale::Element* scales) {
  constexpr int64_t kBlock = Scaling::kBlock;
  int64_t i = 0;
  for (; i + kBlock <= columns; i += kBlock, ++scales) {
    const float multiplier = scaling.store(RunAmax(values + i, kBlock), scales);
    EncodeScaled<Format>(values + i, kBlock, multiplier, codes + i);
  }
  if (i == columns) return;
  const float multiplier = scaling.store(RunAmax(values + i, columns - i), scales);
  EncodeScaled<Format>(values + i, columns - i, multiplier, codes + i);
}

template <bool kSkipsNan, class D>
HWY_INLINE SignedOf<D> ColumnAmax(D d, const float* p, int64_t pitch, int64_t rows) {
  auto amax = hn::Zero(hn::RebindToSigned<D>());
  for (int64_t r = 0; r < rows; ++r) amax = hn::Max(amax, Magnitude<kSkipsNan>(d, p + r * pitch));
  return amax;
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
    if (!hn::AllFalse(di, hn::Gt(amax, hn::Set(di, 0x7F800000)))) {
      amax = ColumnAmax<true>(d, values + i, pitch, rows);
    }
    const auto multiplier = scaling.Store(d, hn::BitCast(d, amax), scales + i);
    for (int64_t r = 0; r < rows; ++r) {
      const auto v = hn::Mul(hn::LoadU(d, values + r * pitch + i), multiplier);
      Format::Store(d, v, out.data + r * out.stride + i);
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
    using Scale = typename decltype(scaling)::Scale::Element;
    for (int64_t r = 0; rowwise.data != nullptr && r < rows; ++r) {
      QuantizeRow<Format>(scaling, values + r * pitch, columns, rowwise.data + r * rowwise.stride,
                          static_cast<Scale*>(rowwise.scales) + r * rowwise.scale_stride);
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
    float amax = 0;
    for (int64_t r = 0; r < rows; ++r) amax = std::max(amax, RunAmax(values + r * pitch, columns));
    const float multiplier = scaling.store(amax, static_cast<float*>(tile.scales));
    for (int64_t r = 0; r < rows; ++r) {
      EncodeScaled<Format>(values + r * pitch, columns, multiplier, tile.data + r * tile.stride);
    }
  });
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
