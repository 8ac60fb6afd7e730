// FP8 elements and their scales as vectors of floats, and rows of them: the bits of core/fp8.h on
// every target. Include after simd_targets.h, inside the foreach_target pattern.
//
// E4m3 and E5m2 are formats in the style of convert-inl.h's; E8m0 and Fp32 are what scales are
// stored as.
#include "backend/cpu/convert-inl.h"

#if defined(MOIRE_FP8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_FP8_INL_H_
#undef MOIRE_FP8_INL_H_
#else
#define MOIRE_FP8_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "backend/cpu/quantize.h"
#include "core/fp8.h"
#include "core/scale_shapes.h"

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
  // ones too, so that an instruction does the rest. What comes back for other codes is anything.
  static constexpr float kNumberScale = Definition::kBias == 15 ? 1.0F : 0x1p8F;
  template <class D>
  static HWY_INLINE hn::VFromD<D> LoadNumbers(D d, const uint8_t* p) {
    const hn::Rebind<int16_t, D> di;
    const auto bytes = hn::LoadU(hn::Rebind<int8_t, D>(), reinterpret_cast<const int8_t*>(p));
    // The sign lies where it belongs, and below once more where there was a bit to fill.
    const auto shifted = hn::ShiftLeft<10 - Definition::kMantissaBits>(hn::PromoteTo(di, bytes));
    constexpr auto kMask = static_cast<int16_t>(0x8000 | 0x7F << (10 - Definition::kMantissaBits));
    const auto half = hn::And(shifted, hn::Set(di, kMask));
    return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), half));
  }
  // Whether all of Lanes(d) codes are those of numbers, by their largest magnitude.
  template <class D8>
  static HWY_INLINE bool AreNumbers(D8, hn::VFromD<D8> largest) {
    const hn::RebindToSigned<D8> di;
    const auto last = hn::Set(di, static_cast<int8_t>(Definition::kMaxCode));
    return hn::AllFalse(di, hn::Gt(hn::BitCast(di, largest), last));
  }
  static HWY_INLINE bool AreNumbers(const uint8_t* p, int64_t n) {
    const hn::CappedTag<uint8_t, 32> d;  // a block of 32 is whole vectors
    const auto magnitude = hn::Set(d, uint8_t{0x7F});
    auto largest = hn::Zero(d);
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      largest = hn::Max(largest, hn::And(hn::LoadU(d, p + i), magnitude));
    }
    bool are_numbers = AreNumbers(d, largest);
    for (; i < n; ++i) are_numbers &= (p[i] & 0x7F) <= Definition::kMaxCode;
    return are_numbers;
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

// n elements that share a scale.
template <class Format>
HWY_INLINE void DecodeBlock(const uint8_t* src, float scale, int64_t n, float* dst) {
  const float factor = scale * Format::kNumberScale;
  const auto decode_numbers = [&](auto d, int64_t i) HWY_ATTR {
    hn::StoreU(hn::Mul(Format::LoadNumbers(d, src + i), hn::Set(d, factor)), d, dst + i);
  };
  const auto decode = [&](auto d, int64_t i) HWY_ATTR {
    hn::StoreU(hn::Mul(Format::Load(d, src + i), hn::Set(d, scale)), d, dst + i);
  };
  int64_t i = 0;
  if (std::fabs(factor) <= std::numeric_limits<float>::max() && Format::AreNumbers(src, n)) {
    i = VectorsFrom(FloatTag(), i, n, decode_numbers);
    i = VectorsFrom(hn::CappedTag<float, 4>(), i, n, decode_numbers);
  }
  i = VectorsFrom(FloatTag(), i, n, decode);
  VectorsFrom(hn::CappedTag<float, 1>(), i, n, decode);
}

// Columns first ... first + n - 1 of a row whose blocks of columns share a scale (rowwise operands,
// tiles); `row` and `scales` are those of column 0.
inline void DecodeRowwise(const void* row, DType dtype, const void* scales, DType scale_dtype,
                          int64_t first, int64_t n, float* dst) {
  const auto* const codes = static_cast<const uint8_t*>(row) + first;
  with_fp8_format(dtype, [&](auto format) HWY_ATTR {
    with_scale_format(scale_dtype, [&](auto scale) HWY_ATTR {
      using Scale = decltype(scale);
      constexpr int64_t kBlock = scale_block(Scale::kDType);
      const auto* const s = static_cast<const typename Scale::Element*>(scales);
      for (int64_t i = 0, length = 0; i < n; i += length) {
        const int64_t column = first + i;
        length = std::min(kBlock - column % kBlock, n - i);
        DecodeBlock<decltype(format)>(codes + i, Scale::decode(s[column / kBlock]), length,
                                      dst + i);
      }
    });
  });
}

// Rows of codes that share a row of scales, a scale for each column (columnwise operands).
struct ColumnScaledRows {
  const uint8_t* codes;  // of the first row
  int64_t stride, count;
};

// The same columns of such rows; those of dst are n apart.
template <class Format, class Scale>
HWY_INLINE void DecodeColumns(const ColumnScaledRows& rows, const typename Scale::Element* scales,
                              int64_t n, float* HWY_RESTRICT dst) {
  for_each_vector(n, [&](auto d, int64_t i) HWY_ATTR {
    const hn::Rebind<uint8_t, decltype(d)> d8;
    const auto magnitude = hn::Set(d8, uint8_t{0x7F});
    const auto scale = Scale::Load(d, scales + i);
    const auto factor = hn::Mul(scale, hn::Set(d, Format::kNumberScale));
    auto largest = hn::Zero(d8);
    const auto [codes, stride, count] = rows;
    for (int64_t r = 0; r < count; ++r) {
      const uint8_t* const row = codes + r * stride + i;
      largest = hn::Max(largest, hn::And(hn::LoadU(d8, row), magnitude));
      hn::StoreU(hn::Mul(Format::LoadNumbers(d, row), factor), d, dst + r * n + i);
    }
    if (HWY_LIKELY(Format::AreNumbers(d8, largest) && hn::AllTrue(d, hn::IsFinite(factor)))) return;
    for (int64_t r = 0; r < count; ++r) {
      const auto v = Format::Load(d, codes + r * stride + i);
      hn::StoreU(hn::Mul(v, scale), d, dst + r * n + i);
    }
  });
}
inline void DecodeColumnwise(const ColumnScaledRows& rows, DType dtype, const void* scales,
                             DType scale_dtype, int64_t first, int64_t n, float* dst) {
  const ColumnScaledRows from{rows.codes + first, rows.stride, rows.count};
  with_fp8_format(dtype, [&](auto format) HWY_ATTR {
    with_scale_format(scale_dtype, [&](auto scale) HWY_ATTR {
      using Scale = decltype(scale);
      const auto* const s = static_cast<const typename Scale::Element*>(scales) + first;
      DecodeColumns<decltype(format), Scale>(from, s, n, dst);
    });
  });
}

// Columns [c, c + n) of `rows` rows of a strip from r on, which are n floats apart in dst.
inline void DecodePiece(const StripSource& from, int64_t r, int64_t rows, int64_t c, int64_t n,
                        float* dst) {
  const auto codes = [&](int64_t row) { return static_cast<const uint8_t*>(from.rows[row]); };
  if (from.direction == MOIRE_COLUMNWISE) {
    const ColumnScaledRows of{codes(r), rows > 1 ? codes(r + 1) - codes(r) : 0, rows};
    return DecodeColumnwise(of, from.dtype, from.scales[r], from.scale_dtype, c, n, dst);
  }
  for (int64_t i = r; i < r + rows; ++i, dst += n) {
    DecodeRowwise(codes(i), from.dtype, from.scales[i], from.scale_dtype, c, n, dst);
  }
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
