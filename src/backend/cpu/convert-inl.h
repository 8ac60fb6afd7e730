// FP32, BF16 and FP16 memory as vectors and rows of floats: the bits of core/float_formats.h
// (nearest even, every NaN to 0x7FFF, subnormals kept), in integer arithmetic, so that they are the
// same on every target. Include after simd_targets.h, inside the foreach_target pattern.
//
// Fp32, Bf16 and Fp16 are the formats that kernels take as template parameters; with_format() goes
// from a run-time dtype to one of them.
#include <hwy/highway.h>

#if defined(MOIRE_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_CONVERT_INL_H_
#undef MOIRE_CONVERT_INL_H_
#else
#define MOIRE_CONVERT_INL_H_
#endif

#include <moire/tensor.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/float_formats.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, because sums that must not depend on the vector width run in 16 lanes.
using FloatTag = hn::CappedTag<float, 16>;
template <class D>
using UnsignedOf = hn::VFromD<hn::RebindToUnsigned<D>>;

struct Fp32 {
  using Element = float;
  static constexpr DType kDType = DType::kFP32;
  static constexpr uint32_t kInfinity = 0x7F800000;
  static float decode(float x) { return x; }
  static float encode(float x) { return x; }

  template <class D>
  static HWY_INLINE hn::VFromD<D> Load(D d, const float* p) {
    return hn::LoadU(d, p);
  }
  // The same of elements among which there is no NaN.
  template <class D>
  static HWY_INLINE hn::VFromD<D> LoadNumbers(D d, const float* p) {
    return hn::LoadU(d, p);
  }
  template <class D>
  static HWY_INLINE hn::VFromD<D> Encode(D, hn::VFromD<D> v) {
    return v;
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::VFromD<D> v, float* p) {
    hn::StoreU(v, d, p);
  }
  // first = p[0], p[2], ...; second = p[1], p[3], ...
  template <class D>
  static HWY_INLINE void LoadPairs(D d, const float* p, hn::VFromD<D>& first,
                                   hn::VFromD<D>& second) {
    hn::LoadInterleaved2(d, p, first, second);
  }
  template <class D>
  static HWY_INLINE void StorePairs(D d, hn::VFromD<D> first, hn::VFromD<D> second, float* p) {
    hn::StoreInterleaved2(first, second, d, p);
  }
  // What storing and loading makes of a value.
  template <class D>
  static HWY_INLINE hn::VFromD<D> Round(D, hn::VFromD<D> v) {
    return v;
  }
};

// 16 bits in the low half of each 32-bit lane; on the way in, the high half is ignored.
struct Bf16Bits {
  template <class D>
  static HWY_INLINE hn::VFromD<D> DecodeBits(D d, UnsignedOf<D> bits) {
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  }
  template <class D>
  static HWY_INLINE UnsignedOf<D> EncodeBits(D, hn::VFromD<D> v) {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1U));
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFU)), odd));
    return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), hn::Set(du, 0x7FFFU), rounded);
  }
  // The same in 16-bit lanes.
  template <class D>
  static HWY_INLINE hn::VFromD<hn::Rebind<uint16_t, D>> Encode(D d, hn::VFromD<D> v) {
    const auto bits = hn::BitCast(hn::RebindToSigned<D>(), EncodeBits(d, v));
    return hn::DemoteTo(hn::Rebind<uint16_t, D>(), bits);
  }
};

struct Fp16Bits {
  template <class D>
  static HWY_INLINE hn::VFromD<D> DecodeBits(D d, UnsignedOf<D> bits) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto magnitude = hn::BitCast(di, hn::And(bits, hn::Set(du, 0x7FFFU)));
    const auto shifted = hn::ShiftLeft<13>(magnitude);
    const auto normal = hn::Add(shifted, hn::Set(di, 112 << 23));
    const auto special = hn::Or(shifted, hn::Set(di, 0x7F800000));
    // A multiple of 2^-24, exact.
    const auto subnormal =
        hn::BitCast(di, hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 0x1p-24F)));
    auto out = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x7BFF)), special, normal);
    out = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x0400)), subnormal, out);
    const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000U)));
    return hn::BitCast(d, hn::Or(hn::BitCast(du, out), sign));
  }
  template <class D>
  static HWY_INLINE UnsignedOf<D> EncodeBits(D d, hn::VFromD<D> v) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto bits = hn::BitCast(du, v);
    const auto magnitude = hn::BitCast(di, hn::And(bits, hn::Set(du, 0x7FFFFFFFU)));
    // Below 2^-14: adding 0.5 puts the unit in the last place at 2^-24 and rounds to nearest even.
    const auto sum = hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5F));
    const auto subnormal = hn::Sub(hn::BitCast(di, sum), hn::Set(di, 0x3F000000));
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 1));
    const auto biased = hn::Add(hn::Sub(magnitude, hn::Set(di, 0x38000000 - 0xFFF)), odd);
    // Whatever rounds past the largest number is infinity.
    const auto normal = hn::Min(hn::ShiftRight<13>(biased), hn::Set(di, 0x7C00));
    auto out = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x38800000)), subnormal, normal);
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000U));
    out = hn::Or(out, hn::BitCast(di, sign));
    const auto is_nan = hn::Gt(magnitude, hn::Set(di, 0x7F800000));
    return hn::BitCast(du, hn::IfThenElse(is_nan, hn::Set(di, 0x7FFF), out));
  }
  // By the processor's instruction: every NaN becomes another one anyway.
  template <class D>
  static HWY_INLINE hn::VFromD<hn::Rebind<uint16_t, D>> Encode(D, hn::VFromD<D> v) {
    const hn::Rebind<uint16_t, D> d16;
    const hn::RebindToSigned<decltype(d16)> di;
    const auto bits = hn::BitCast(d16, hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v));
    const auto nan = hn::Set(d16, uint16_t{0x7FFF});
    const auto magnitude = hn::BitCast(di, hn::And(bits, nan));
    const auto is_nan = hn::Gt(magnitude, hn::Set(di, int16_t{0x7C00}));
    return hn::IfThenElse(hn::RebindMask(d16, is_nan), nan, bits);
  }
};

template <class Bits>
struct HalfFormat {
  using Element = uint16_t;

  template <class D>
  static HWY_INLINE hn::VFromD<D> Load(D d, const uint16_t* p) {
    const hn::Rebind<uint16_t, D> d16;
    return Bits::DecodeBits(d, hn::PromoteTo(hn::RebindToUnsigned<D>(), hn::LoadU(d16, p)));
  }
  template <class D>
  static HWY_INLINE hn::VFromD<hn::Rebind<uint16_t, D>> Encode(D d, hn::VFromD<D> v) {
    return Bits::Encode(d, v);
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::VFromD<D> v, uint16_t* p) {
    hn::StoreU(Encode(d, v), hn::Rebind<uint16_t, D>(), p);
  }
  // Both elements of a pair share one 32-bit lane, so that no lane has to move.
  template <class D>
  static HWY_INLINE void LoadPairs(D d, const uint16_t* p, hn::VFromD<D>& first,
                                   hn::VFromD<D>& second) {
    const auto pairs = hn::LoadU(hn::RebindToUnsigned<D>(), reinterpret_cast<const uint32_t*>(p));
    first = Bits::DecodeBits(d, pairs);
    second = Bits::DecodeBits(d, hn::ShiftRight<16>(pairs));
  }
  template <class D>
  static HWY_INLINE void StorePairs(D d, hn::VFromD<D> first, hn::VFromD<D> second, uint16_t* p) {
    const auto high = hn::ShiftLeft<16>(Bits::EncodeBits(d, second));
    const auto pairs = hn::Or(Bits::EncodeBits(d, first), high);
    hn::StoreU(pairs, hn::RebindToUnsigned<D>(), reinterpret_cast<uint32_t*>(p));
  }
  template <class D>
  static HWY_INLINE hn::VFromD<D> Round(D d, hn::VFromD<D> v) {
    return Bits::DecodeBits(d, Bits::EncodeBits(d, v));
  }
};

struct Bf16 : HalfFormat<Bf16Bits> {
  static constexpr DType kDType = DType::kBF16;
  static constexpr uint16_t kInfinity = 0x7F80;
  static float decode(uint16_t x) { return bf16_to_float(x); }
  static uint16_t encode(float x) { return float_to_bf16(x); }
  template <class D>
  static HWY_INLINE hn::VFromD<D> LoadNumbers(D d, const uint16_t* p) {
    return Load(d, p);
  }
};

struct Fp16 : HalfFormat<Fp16Bits> {
  static constexpr DType kDType = DType::kFP16;
  static constexpr uint16_t kInfinity = 0x7C00;
  static float decode(uint16_t x) { return fp16_to_float(x); }
  static uint16_t encode(float x) { return float_to_fp16(x); }
  // By the processor's instruction, which would make a signalling NaN a quiet one.
  template <class D>
  static HWY_INLINE hn::VFromD<D> LoadNumbers(D d, const uint16_t* p) {
    const hn::Rebind<uint16_t, D> d16;
    return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), hn::LoadU(d16, p)));
  }
};

// Calls f(Fp32{}), f(Bf16{}) or f(Fp16{}).
template <class F>
HWY_INLINE decltype(auto) with_format(DType dtype, F&& f) {
  if (dtype == DType::kBF16) return f(Bf16{});
  if (dtype == DType::kFP16) return f(Fp16{});
  return f(Fp32{});
}

// Calls f(d, i) for elements i ... i + Lanes(d) - 1 of n, in order: whole vectors, then vectors of
// 8, of 4 and of 1, so that short runs are vectors too.
template <class D, class Index, class F>
HWY_INLINE Index VectorsFrom(D d, Index i, Index n, F&& f) {
  const auto lanes = static_cast<Index>(hn::Lanes(d));
  for (; i + lanes <= n; i += lanes) f(d, i);
  return i;
}
template <class Index, class F>
HWY_INLINE void for_each_vector(Index n, F&& f) {
  Index i = VectorsFrom(FloatTag(), Index{0}, n, f);
  if constexpr (hn::MaxLanes(FloatTag()) > 8) i = VectorsFrom(hn::CappedTag<float, 8>(), i, n, f);
  i = VectorsFrom(hn::CappedTag<float, 4>(), i, n, f);
  VectorsFrom(hn::CappedTag<float, 1>(), i, n, f);
}

template <class Format>
inline void DecodeRun(const typename Format::Element* src, size_t n, float* dst) {
  for_each_vector(
      n, [&](auto d, size_t i) HWY_ATTR { hn::StoreU(Format::Load(d, src + i), d, dst + i); });
}
template <>
inline void DecodeRun<Fp32>(const float* src, size_t n, float* dst) {
  if (n != 0) std::memcpy(dst, src, n * sizeof(float));
}

template <class Format>
inline void EncodeRun(const float* src, size_t n, typename Format::Element* dst) {
  for_each_vector(
      n, [&](auto d, size_t i) HWY_ATTR { Format::Store(d, hn::LoadU(d, src + i), dst + i); });
}
template <>
inline void EncodeRun<Fp32>(const float* src, size_t n, float* dst) {
  if (n != 0) std::memcpy(dst, src, n * sizeof(float));
}

// n elements of a storage type to floats.
inline void DecodeRow(const void* src, DType dtype, size_t n, float* dst) {
  with_format(dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    DecodeRun<Format>(static_cast<const typename Format::Element*>(src), n, dst);
  });
}

// n floats to a storage type.
inline void EncodeRow(const float* src, size_t n, DType dtype, void* dst) {
  with_format(dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    EncodeRun<Format>(src, n, static_cast<typename Format::Element*>(dst));
  });
}

// In place, what storing as `dtype` and loading again makes of n floats.
inline void RoundRow(float* values, size_t n, DType dtype) {
  if (dtype == DType::kFP32) return;
  with_format(dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    for_each_vector(n, [&](auto d, size_t i) HWY_ATTR {
      hn::StoreU(Format::Round(d, hn::LoadU(d, values + i)), d, values + i);
    });
  });
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
