// Elements to FP8 codes, once their scales are known, in two ways: the general one through floats,
// and a quick one in 16-bit lanes. Include after simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/quantize_scales-inl.h"

#if defined(MOIRE_QUANTIZE_ENCODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_ENCODE_INL_H_
#undef MOIRE_QUANTIZE_ENCODE_INL_H_
#else
#define MOIRE_QUANTIZE_ENCODE_INL_H_
#endif

#include <bit>
#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Past the cache only where p is aligned.
template <class D>
HWY_INLINE void StoreCodes(D d, hn::VFromD<D> codes, bool bypasses_cache, uint8_t* p) {
  if (bypasses_cache && hn::MaxLanes(d) >= 16) {
    hn::Stream(codes, d, p);
  } else {
    hn::StoreU(codes, d, p);
  }
}

// ---- floats times their block's multiplier, rounded to FP32 and then to FP8 ----

// Finite values of a block are never scaled past what rounds to the largest code.
template <class Format, bool kFinite, class Source, class D>
HWY_INLINE hn::Vec<hn::Rebind<uint8_t, D>> EncodeFloats(D d, const typename Source::Element* p,
                                                        hn::VFromD<D> factor) {
  const hn::Rebind<uint8_t, D> d8;
  if constexpr (kFinite) {
    const auto v = hn::Mul(Source::LoadNumbers(d, p), factor);
    return hn::TruncateTo(d8, Format::EncodeLowByte(d, v));
  } else {
    const auto v = hn::Mul(Source::Load(d, p), factor);
    return hn::TruncateTo(d8, Format::EncodeBits(d, v));
  }
}

// From element i of a row on; factor(d, i) is what elements from i on are multiplied by.
template <class Format, bool kFinite, class Rows, class Factor>
HWY_INLINE void EncodeFloatRow([[maybe_unused]] const Rows& rows,
                               const typename Rows::Format::Element* p, int64_t n,
                               [[maybe_unused]] bool bypasses_cache, uint8_t* codes,
                               Factor&& factor) {
  using Source = typename Rows::Format;
  const auto encode = [&](auto tag, int64_t i) HWY_ATTR {
    return EncodeFloats<Format, kFinite, Source>(tag, p + i, factor(tag, i));
  };
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  // Two vectors, so that there is enough to store past the cache.
  const FloatTag d;
  const hn::Twice<hn::Rebind<uint8_t, FloatTag>> d8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    rows.prefetch(p + i, 2 * lanes);
    StoreCodes(d8, hn::Combine(d8, encode(d, i + lanes), encode(d, i)), bypasses_cache, codes + i);
  }
#endif
  const auto store = [&](auto tag, int64_t j) HWY_ATTR {
    hn::StoreU(encode(tag, j), hn::Rebind<uint8_t, decltype(tag)>(), codes + j);
  };
  i = VectorsFrom(FloatTag(), i, n, store);
  i = VectorsFrom(hn::CappedTag<float, 4>(), i, n, store);
  VectorsFrom(hn::CappedTag<float, 1>(), i, n, store);
}

// Columns [first, first + n) of row r, one scale for all.
template <class Format, bool kFinite, class Rows>
HWY_INLINE void EncodeRun(const Rows& rows, int64_t r, int64_t first, int64_t n, float multiplier,
                          const QuantizedPiece& out) {
  const auto factor = [&](auto d, int64_t) HWY_ATTR { return hn::Set(d, multiplier); };
  EncodeFloatRow<Format, kFinite>(rows, rows.row(r) + first, n, out.bypasses_cache,
                                  out.data + r * out.stride + first, factor);
}
template <class Format, class Rows>
inline void EncodeRun(const Rows& rows, int64_t r, int64_t first, int64_t n, float multiplier,
                      bool is_finite, const QuantizedPiece& out) {
  if (is_finite) return EncodeRun<Format, true>(rows, r, first, n, multiplier, out);
  out.note_non_finite();
  EncodeRun<Format, false>(rows, r, first, n, multiplier, out);
}

// `columns` columns of some rows, each with its own scale.
template <class Format, class Rows>
HWY_INLINE void EncodeColumns(const Rows& read, int64_t num_rows, int64_t columns,
                              const float* multipliers, bool are_finite,
                              const QuantizedPiece& out) {
  const auto factor = [&](auto d, int64_t i) HWY_ATTR { return hn::LoadU(d, multipliers + i); };
  const auto rows = read.settled();
  if (!are_finite) out.note_non_finite();
  for (int64_t r = 0; r < num_rows; ++r) {
    uint8_t* const codes = out.data + r * out.stride;
    const auto encode = [&](auto finite) HWY_ATTR {
      EncodeFloatRow<Format, finite.value>(rows, rows.row(r), columns, out.bypasses_cache, codes,
                                           factor);
    };
    are_finite ? encode(std::true_type()) : encode(std::false_type());
  }
}

// The quick way to FP8: numbers times a power of two, in 16-bit lanes and without a multiplication.
// Rounding drops low bits of a BF16 number whose exponent was moved; the few that become subnormal
// codes are counted past the middles between those.
//
// FP32 and FP16 numbers are rounded to odd BF16 numbers first: cut off, and the lowest bit set
// where anything was lost. Their codes stay what they are: a code depends on how its number
// compares with the smallest normal number of the format, with middles of neighbouring codes and
// with codes, times a power of two. Each of these is a BF16 number T whose lowest bit is clear. A
// number between T and T's neighbour either way becomes that neighbour, or stays between; so it is
// below, at or above T as before.
//
// Nearly all of a matrix goes this way. Blocks with other values (infinite, NaN, or so small that a
// BF16 number beside the smallest code is subnormal) go through floats.

// A block of 32 is whole vectors.
using QuickTag = hn::CappedTag<uint16_t, 32>;

constexpr uint16_t bf16_bits(float x) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
}

// Finite elements as BF16 numbers rounded to odd.
template <class Source>
struct Odd;
template <>
struct Odd<Bf16> {
  template <class D>
  static HWY_INLINE hn::VFromD<D> Load(D d, const uint16_t* p) {
    return hn::LoadU(d, p);
  }
};
template <>
struct Odd<Fp32> {
  // In the upper half of each lane; what lies below is anything.
  template <class D>
  static HWY_INLINE hn::VFromD<D> Round(D d, hn::VFromD<D> bits) {
    const auto low = hn::Set(d, 0xFFFFU);
    return hn::Or(bits, hn::Add(hn::And(bits, low), low));
  }
  template <class D>
  static HWY_INLINE hn::VFromD<D> Load(D d, const float* p) {
    const auto* const bits = reinterpret_cast<const uint32_t*>(p);
#if HWY_TARGET != HWY_SCALAR
    if constexpr (hn::MaxLanes(D()) > 1) {
      const hn::Repartition<uint32_t, D> d32;
      const auto low = Round(d32, hn::LoadU(d32, bits));
      const auto high = Round(d32, hn::LoadU(d32, bits + hn::Lanes(d32)));
      return hn::ConcatOdd(d, hn::BitCast(d, high), hn::BitCast(d, low));
    } else
#endif
    {
      const hn::Rebind<uint32_t, D> d32;
      return hn::TruncateTo(d, hn::ShiftRight<16>(Round(d32, hn::LoadU(d32, bits))));
    }
  }
};
template <>
struct Odd<Fp16> {
  template <class D>
  static HWY_INLINE hn::VFromD<D> Load(D d, const uint16_t* p) {
    const auto bits = hn::LoadU(d, p), magnitude = hn::And(bits, hn::Set(d, uint16_t{0x7FFF}));
    // Zeros wrap around, past all others.
    const auto less_one = hn::Sub(magnitude, hn::Set(d, uint16_t{1}));
    const auto short_by = hn::SaturatedSub(hn::Set(d, uint16_t{0x3FF}), less_one);
    if (HWY_UNLIKELY(!hn::AllTrue(d, hn::Eq(short_by, hn::Zero(d))))) return LoadSubnormal(d, p);
    const auto seven = hn::Set(d, uint16_t{7});
    const auto lost = hn::Add(hn::And(bits, seven), seven);
    const auto shifted = hn::ShiftRight<3>(hn::Or(magnitude, lost));
    const auto number = hn::Add(shifted, hn::Set(d, uint16_t{112 << 7}));
    const auto is_zero = hn::Eq(magnitude, hn::Zero(d));
    const auto sign = hn::And(bits, hn::Set(d, uint16_t{0x8000}));
    return hn::Or(hn::IfThenZeroElse(is_zero, number), sign);
  }

 private:
  template <class D>
  static HWY_NOINLINE hn::VFromD<D> LoadSubnormal(D d, const uint16_t* p) {
    alignas(64) float values[hn::MaxLanes(D())];
    const hn::CappedTag<float, hn::MaxLanes(D())> df;
    for (size_t i = 0; i < hn::Lanes(d); i += hn::Lanes(df)) {
      hn::Store(Fp16::LoadNumbers(df, p + i), df, values + i);
    }
    return Odd<Fp32>::Load(d, values);
  }
};

// The largest BF16 magnitude that times `multipliers`, powers of two, is no normal number of the
// format. At least what leaves room for subnormal codes, which matters to zeros alone.
template <class Format, class D>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> LargestSubnormal(D, hn::VFromD<D> multipliers) {
  const hn::RebindToSigned<D> di;
  const auto one_over_it = hn::Set(di, static_cast<int32_t>(Format::kSmallestNormal) + (127 << 23));
  const auto smallest = hn::Sub(one_over_it, hn::BitCast(di, multipliers));
  const auto bits = hn::ShiftRight<16>(hn::Max(smallest, hn::Set(di, 6 << 23)));
  return hn::DemoteTo(hn::Rebind<uint16_t, D>(), hn::Sub(bits, hn::Set(di, 1)));
}
template <class Format>
HWY_INLINE void FindLargestSubnormals(const float* multipliers, int64_t count,
                                      uint16_t* subnormal) {
  const auto find = [&](auto d, int64_t i) HWY_ATTR {
    const auto largest = LargestSubnormal<Format>(d, hn::LoadU(d, multipliers + i));
    hn::StoreU(largest, hn::Rebind<uint16_t, decltype(d)>(), subnormal + i);
  };
  const int64_t i = VectorsFrom(FloatTag(), int64_t{0}, count, find);
  VectorsFrom(hn::CappedTag<float, 1>(), i, count, find);
}

// Codes of magnitudes, of which `subnormal` are the largest that become no normal code.
template <class Format>
struct QuickCodes {
  static constexpr int kMantissaBits = Format::Scalar::kMantissaBits;
  static constexpr int kDropped = 7 - kMantissaBits;

  // Wrong for what is neither zero nor a normal code.
  template <class D>
  static HWY_INLINE hn::VFromD<D> Normal(D d, hn::VFromD<D> magnitude, hn::VFromD<D> subnormal) {
    // Rounded to nearest even by adding a little less than half, and the lowest bit that is kept.
    constexpr uint16_t kHalf = (1U << (kDropped - 1)) - 1;
    const auto odd = hn::And(hn::ShiftRight<kDropped>(magnitude), hn::Set(d, uint16_t{1}));
    const auto base = hn::Sub(subnormal, hn::Set(d, uint16_t{0x80 + kHalf - 1}));
    return hn::ShiftRight<kDropped>(hn::SaturatedSub(hn::Add(magnitude, odd), base));
  }
  // The same, right for all.
  template <class D>
  static HWY_INLINE hn::VFromD<D> Any(D d, hn::VFromD<D> magnitude, hn::VFromD<D> subnormal) {
    const hn::RebindToSigned<D> di;
    const auto m = hn::BitCast(di, magnitude), s = hn::BitCast(di, subnormal);
    auto count = hn::Zero(di);
#pragma GCC unroll 8
    for (int code = 0; code < 1 << kMantissaBits; ++code) {
      // The middle between two codes goes to the even one.
      const float middle = (static_cast<float>(code) + 0.5F) / (1 << kMantissaBits);
      const auto below_one = static_cast<int16_t>(bf16_bits(1.0F) - bf16_bits(middle));
      const auto last = hn::Sub(s, hn::Set(di, static_cast<int16_t>(below_one - 1 + code % 2)));
      count = hn::Sub(count, hn::VecFromMask(di, hn::Gt(m, last)));
    }
    const auto is_normal = hn::Gt(m, s);
    return hn::BitCast(
        d, hn::IfThenElse(is_normal, hn::BitCast(di, Normal(d, magnitude, subnormal)), count));
  }

  // Lanes(d) codes with their signs; past the cache only where `codes` is aligned.
  template <class D>
  static HWY_INLINE void Store(D d, hn::VFromD<D> bits, hn::VFromD<D> subnormal,
                               bool bypasses_cache, uint8_t* codes) {
    const auto magnitude = hn::And(bits, hn::Set(d, uint16_t{0x7FFF}));
    auto code = Normal(d, magnitude, subnormal);
    // Zeros wrap around and are no fewer than any.
    const auto short_by = hn::SaturatedSub(subnormal, hn::Sub(magnitude, hn::Set(d, uint16_t{1})));
    if (HWY_UNLIKELY(!hn::AllTrue(d, hn::Eq(short_by, hn::Zero(d))))) {
      code = Any(d, magnitude, subnormal);
    }
    code = hn::Or(code, hn::And(hn::ShiftRight<8>(bits), hn::Set(d, uint16_t{0x80})));
    const hn::Rebind<uint8_t, D> d8;
    StoreCodes(d8, hn::DemoteTo(d8, hn::BitCast(hn::RebindToSigned<D>(), code)), bypasses_cache,
               codes);
  }
};

// Columns [first, first + n) of row r, one scale for all; n is a multiple of 32.
template <class Format, class Rows>
HWY_INLINE void EncodeQuickRun(const Rows& rows, int64_t r, int64_t first, int64_t n,
                               uint16_t subnormal, const QuantizedPiece& out) {
  const QuickTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* const p = rows.row(r) + first;
  uint8_t* const codes = out.data + r * out.stride + first;
  const auto s = hn::Set(d, subnormal);
  for (int64_t i = 0; i < n; i += lanes) {
    rows.prefetch(p + i, lanes);
    QuickCodes<Format>::Store(d, Odd<typename Rows::Format>::Load(d, p + i), s, out.bypasses_cache,
                              codes + i);
  }
}

// `columns` columns of some rows, each with its own scale.
template <class Format, class Rows>
HWY_INLINE void EncodeQuickColumns(const Rows& rows, int64_t num_rows, int64_t columns,
                                   const uint16_t* subnormal, const QuantizedPiece& out) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const auto* const row = rows.row(r);
    uint8_t* const codes = out.data + r * out.stride;
    const auto store = [&](auto tag, int64_t c) HWY_ATTR {
      QuickCodes<Format>::Store(tag, Odd<typename Rows::Format>::Load(tag, row + c),
                                hn::LoadU(tag, subnormal + c), out.bypasses_cache, codes + c);
    };
    const int64_t i = VectorsFrom(QuickTag(), int64_t{0}, columns, store);
    VectorsFrom(hn::CappedTag<uint16_t, 1>(), i, columns, store);
  }
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
