// FP8 elements and their scales as vectors of floats: the bits of core/fp8.h on every target.
// Include after simd_targets.h, inside the foreach_target pattern.
//
// E4m3 and E5m2 are formats in the style of convert-inl.h's; E8m0 and Fp32 are what scales are
// stored as. Rows are decoded with their scales by DecodeBlocks (one scale per block of columns:
// rowwise operands, tiles) and DecodeColumns (one scale per column: columnwise operands).
#include <hwy/highway.h>

#if defined(MOIRE_FP8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_FP8_INL_H_
#undef MOIRE_FP8_INL_H_
#else
#define MOIRE_FP8_INL_H_
#endif

#include <moire/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "backend/cpu/convert-inl.h"
#include "core/fp8.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Lanes(d) bytes to the low byte of 32-bit lanes, and back.
template <class D>
HWY_INLINE UnsignedOf<D> LoadBytes(D, const uint8_t* p) {
  return hn::PromoteTo(hn::RebindToUnsigned<D>(), hn::LoadU(hn::Rebind<uint8_t, D>(), p));
}
template <class D>
HWY_INLINE void StoreBytes(D, UnsignedOf<D> bytes, uint8_t* p) {
  const hn::Rebind<uint8_t, D> d8;
  hn::StoreU(hn::DemoteTo(d8, hn::BitCast(hn::RebindToSigned<D>(), bytes)), d8, p);
}

template <class Definition, DType kType>
struct Fp8Format {
  using Element = uint8_t;
  using Scalar = Definition;
  static constexpr DType kDType = kType;
  static constexpr int kShift = 23 - Definition::kMantissaBits;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Definition::kBias) << 23;
  static constexpr uint32_t kSmallestNormal = kRebias + (1U << 23);

  static float decode(uint8_t code) { return fp8_to_float<Definition>(code); }
  static uint8_t encode(float x) { return float_to_fp8<Definition>(x); }

  // Codes 0 ... 255.
  template <class D>
  static HWY_INLINE hn::VFromD<D> DecodeBits(D d, UnsignedOf<D> codes) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto magnitude = hn::And(codes, hn::Set(du, 0x7FU));
    const auto x = hn::BitCast(d, hn::Add(hn::ShiftLeft<kShift>(magnitude), hn::Set(du, kRebias)));
    // A code without an exponent was read as half the smallest normal number and a fraction of it;
    // twice that, less the smallest normal number, is what it stands for. From the smallest normal
    // number on, that is the larger of the two.
    const auto smallest = hn::Set(d, -std::bit_cast<float>(kSmallestNormal));
    const auto value = hn::BitCast(du, hn::Min(x, hn::MulAdd(x, hn::Set(d, 2.0F), smallest)));
    const auto is_special =
        hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, static_cast<int32_t>(Definition::kMaxCode)));
    const auto unsigned_value =
        hn::IfThenElse(hn::RebindMask(du, is_special), Special(d, magnitude), value);
    const auto sign = hn::ShiftLeft<24>(hn::AndNot(hn::Set(du, 0x7FU), codes));
    return hn::BitCast(d, hn::Or(unsigned_value, sign));
  }

  // Codes of numbers, which shifted are FP16 numbers that are kNumberScale times smaller: subnormal
  // ones too, so that an instruction does the rest. `largest` becomes the largest magnitude of a
  // code so far; past kMaxCode, what comes back is anything.
  static constexpr float kNumberScale = Definition::kBias == 15 ? 1.0F : 0x1p8F;
  template <class D>
  static HWY_INLINE hn::VFromD<D> LoadNumbers(D d, const uint8_t* p,
                                              hn::VFromD<hn::Rebind<uint16_t, D>>& largest) {
    const hn::Rebind<uint16_t, D> d16;
    const hn::Rebind<int16_t, D> di;
    const auto codes = hn::PromoteTo(d16, hn::LoadU(hn::Rebind<uint8_t, D>(), p));
    largest = hn::Max(largest, hn::And(codes, hn::Set(d16, uint16_t{0x7F})));
    // The sign is where it belongs, and once more in each bit that the shift made room for.
    constexpr int kRight = Definition::kMantissaBits - 2;
    constexpr auto kMask = static_cast<int16_t>(0x8000 | (0x7F00 >> kRight));
    const auto shifted = hn::ShiftRight<kRight>(hn::BitCast(di, hn::ShiftLeft<8>(codes)));
    const auto half = hn::And(shifted, hn::Set(di, kMask));
    return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), half));
  }
  template <class D16>
  static HWY_INLINE bool AreNumbers(D16, hn::VFromD<D16> largest) {
    const hn::RebindToSigned<D16> di;
    const auto last = hn::Set(di, int16_t{Definition::kMaxCode});
    return hn::AllFalse(di, hn::Gt(hn::BitCast(di, largest), last));
  }

  template <class D>
  static HWY_INLINE UnsignedOf<D> EncodeBits(D d, hn::VFromD<D> v) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    constexpr auto kMax = static_cast<int32_t>(std::bit_cast<uint32_t>(Definition::kMax));
    constexpr auto kSmallest = static_cast<int32_t>(kSmallestNormal);
    const auto bits = hn::BitCast(di, v);
    const auto magnitude = hn::And(bits, hn::Set(di, 0x7FFFFFFF));
    const auto is_nan = hn::Gt(magnitude, hn::Set(di, 0x7F800000));
    const auto clamped = hn::Min(magnitude, hn::Set(di, kMax));
    // Adding the power of two whose unit in the last place is the spacing of codes at this
    // magnitude rounds to nearest even and leaves the number of units in the low bits.
    const auto power = hn::And(hn::Max(clamped, hn::Set(di, kSmallest)), hn::Set(di, 0x7F800000));
    const auto unit = hn::Add(power, hn::Set(di, kShift << 23));
    const auto sum = hn::Add(hn::BitCast(d, clamped), hn::BitCast(d, unit));
    const auto units = hn::Sub(hn::BitCast(di, sum), unit);
    const auto above = hn::ShiftRight<kShift>(hn::Sub(power, hn::Set(di, kSmallest)));
    const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(du, v)), hn::Set(du, 0x80U));
    const auto code = hn::Or(hn::BitCast(du, hn::Add(above, units)), sign);
    return hn::IfThenElse(hn::RebindMask(du, is_nan), hn::Set(du, 0x7FU), code);
  }

  // The same, in two thirds of the time, of numbers that are none of NaN, infinite or past what
  // rounds to the largest; the code is the low byte of a lane, whose other bytes are anything.
  template <class D>
  static HWY_INLINE UnsignedOf<D> EncodeLowByte(D d, hn::VFromD<D> v) {
    const hn::RebindToUnsigned<D> du;
    // As above. In the low byte a power of two counts nothing, so it is not taken off again; the
    // constant there takes off the smallest exponent, and is even, for the sake of ties.
    constexpr uint32_t kSmallestCode = (0U - (kSmallestNormal >> kShift)) & 0xFFU;
    static_assert(kSmallestCode % 2 == 0);
    constexpr uint32_t kUnit = (static_cast<uint32_t>(kShift) << 23) | kSmallestCode;
    const auto bits = hn::BitCast(du, v);
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFFU));
    const auto power =
        hn::And(hn::Max(magnitude, hn::Set(du, kSmallestNormal)), hn::Set(du, 0x7F800000U));
    const auto unit = hn::BitCast(d, hn::Add(power, hn::Set(du, kUnit)));
    const auto sum = hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), unit));
    const auto code = hn::Add(sum, hn::ShiftRight<kShift>(power));
    return hn::Or(code, hn::And(hn::ShiftRight<24>(bits), hn::Set(du, 0x80U)));
  }

  template <class D>
  static HWY_INLINE hn::VFromD<D> Load(D d, const uint8_t* p) {
    return DecodeBits(d, LoadBytes(d, p));
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::VFromD<D> v, uint8_t* p) {
    StoreBytes(d, EncodeBits(d, v), p);
  }
  template <class D>
  static HWY_INLINE void StoreLowByte(D d, hn::VFromD<D> v, uint8_t* p) {
    const hn::Rebind<uint8_t, D> d8;
    hn::StoreU(hn::TruncateTo(d8, EncodeLowByte(d, v)), d8, p);
  }
  template <class D>
  static HWY_INLINE hn::VFromD<D> Round(D d, hn::VFromD<D> v) {
    return DecodeBits(d, EncodeBits(d, v));
  }

 private:
  // Infinity, where the format has one, or NaN.
  template <class D>
  static HWY_INLINE UnsignedOf<D> Special(D, UnsignedOf<D> magnitude) {
    const hn::RebindToUnsigned<D> du;
    const auto nan = hn::Set(du, 0x7FC00000U);
    if constexpr (!Definition::kHasInfinity) return nan;
    const auto is_infinity = hn::Eq(magnitude, hn::Set(du, uint32_t{Definition::kFirstSpecial}));
    return hn::IfThenElse(is_infinity, hn::Set(du, 0x7F800000U), nan);
  }
};

struct E4m3 : Fp8Format<E4M3, DType::kE4M3> {};
struct E5m2 : Fp8Format<E5M2, DType::kE5M2> {};

// Powers of two as scales: 2^(code - 127), 255 is NaN.
struct E8m0 {
  using Element = uint8_t;
  static constexpr DType kDType = DType::kE8M0;
  static float decode(uint8_t code) { return e8m0_to_float(code); }

  template <class D>
  static HWY_INLINE hn::VFromD<D> DecodeBits(D d, UnsignedOf<D> codes) {
    const hn::RebindToUnsigned<D> du;
    const auto shifted = hn::Max(hn::ShiftLeft<23>(codes), hn::Set(du, 0x00400000U));
    const auto is_nan = hn::Eq(codes, hn::Set(du, 255U));
    return hn::BitCast(d, hn::IfThenElse(is_nan, hn::Set(du, 0x7FC00000U), shifted));
  }
  template <class D>
  static HWY_INLINE hn::VFromD<D> Load(D d, const uint8_t* p) {
    return DecodeBits(d, LoadBytes(d, p));
  }
};

// Calls f(E4m3{}) or f(E5m2{}).
template <class F>
HWY_INLINE decltype(auto) with_fp8_format(DType dtype, F&& f) {
  if (dtype == DType::kE5M2) return f(E5m2{});
  return f(E4m3{});
}
// Calls f(E8m0{}) or f(Fp32{}), for the dtype of scales.
template <class F>
HWY_INLINE decltype(auto) with_scale_format(DType dtype, F&& f) {
  if (dtype == DType::kFP32) return f(Fp32{});
  return f(E8m0{});
}

template <class Format, class D>
HWY_INLINE size_t DecodeScaledVectors(D d, const uint8_t* src, float scale, size_t i, size_t n,
                                      float* dst) {
  const auto factor = hn::Set(d, scale);
  for (; i + hn::Lanes(d) <= n; i += hn::Lanes(d)) {
    hn::StoreU(hn::Mul(Format::Load(d, src + i), factor), d, dst + i);
  }
  return i;
}

// The same of numbers; false where there was another code, and what was written is anything.
template <class Format, class D>
HWY_INLINE bool DecodeNumbers(D d, const uint8_t* src, float factor, size_t& i, size_t n,
                              float* dst) {
  const hn::Rebind<uint16_t, D> d16;
  auto largest = hn::Zero(d16);
  const auto factors = hn::Set(d, factor);
  for (; i + hn::Lanes(d) <= n; i += hn::Lanes(d)) {
    hn::StoreU(hn::Mul(Format::LoadNumbers(d, src + i, largest), factors), d, dst + i);
  }
  return Format::AreNumbers(d16, largest);
}

// n elements that share a scale.
template <class Format>
HWY_INLINE void DecodeBlock(const uint8_t* src, float scale, size_t n, float* dst) {
  const hn::CappedTag<float, 8> d8;
  const hn::CappedTag<float, 4> d4;
  const float factor = scale * Format::kNumberScale;
  size_t i = 0;
  if (!(std::fabs(factor) <= std::numeric_limits<float>::max()) ||
      !DecodeNumbers<Format>(FloatTag(), src, factor, i, n, dst) ||
      !DecodeNumbers<Format>(d8, src, factor, i, n, dst) ||
      !DecodeNumbers<Format>(d4, src, factor, i, n, dst)) {
    i = DecodeScaledVectors<Format>(FloatTag(), src, scale, 0, n, dst);
    i = DecodeScaledVectors<Format>(d8, src, scale, i, n, dst);
    i = DecodeScaledVectors<Format>(d4, src, scale, i, n, dst);
  }
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
  const hn::Rebind<uint16_t, D> d16;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + lanes <= n; i += lanes) {
    const auto scale = Scale::Load(d, scales + i);
    const auto factor = hn::Mul(scale, hn::Set(d, Format::kNumberScale));
    auto largest = hn::Zero(d16);
    for (int64_t r = 0; r < rows.count; ++r) {
      const auto v = Format::LoadNumbers(d, rows.codes + r * rows.stride + i, largest);
      hn::StoreU(hn::Mul(v, factor), d, dst + r * n + i);
    }
    if (HWY_LIKELY(Format::AreNumbers(d16, largest) && hn::AllTrue(d, hn::IsFinite(factor)))) {
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
