// core/activation.h on vectors of floats, with at most 8 ulp in h over the whole range, results
// near underflow included; every target gives the same bits.
//
//   sigmoid       e = exp(-|x|); r = 1 / (1 + e); sigma = (x < 0 ? e : 1) * r, and
//                 1 - sigma = (x < 0 ? 1 : e) * r, neither by a difference
//   v * sigma     for x < 0, e = p * 2^k is not formed, lest it lose bits to underflow:
//                 ((v * (p * 2^floor(k / 2))) * r) * 2^(k - floor(k / 2)); for x >= 0, v * r.
//                 Below x = -120 it is v * 0
#include "backend/cpu/convert-inl.h"

#if defined(MOIRE_ACTIVATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_ACTIVATION_INL_H_
#undef MOIRE_ACTIVATION_INL_H_
#else
#define MOIRE_ACTIVATION_INL_H_
#endif

#include <moire/glu.h>

#include <type_traits>

#include "core/host_device.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {

using hn::Abs, hn::Add, hn::Gt, hn::IfThenElse, hn::IfThenZeroElse, hn::Lt, hn::Mul, hn::MulAdd,
    hn::MulSub, hn::Neg, hn::Sub;

using Floats = hn::VFromD<FloatTag>;
using Integers = hn::VFromD<hn::RebindToSigned<FloatTag>>;

HWY_INLINE Floats Splat(float x) { return hn::Set(FloatTag(), x); }

// exp(t) as mantissa * 2^exponent, so that the caller decides where it underflows.
struct ScaledExp {
  Floats mantissa;    // 0.70 to 1.42, error below 1 ulp
  Integers exponent;  // at least -175
};

// The low part of an argument that has none.
struct Exact {};

// exp(t + low) for -120 <= t <= 0 and low below one ulp of t. NaN goes to the mantissa.
template <class Low>
HWY_INLINE ScaledExp ExpOfNegative(Floats t, Low low) {
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const hn::RebindToSigned<FloatTag> di;
  const Floats shifter = Splat(0x1.8p+23F);
  const Floats shifted = MulAdd(t, Splat(0x1.715476p+0F), shifter);  // log2(e)
  const Floats kf = Sub(shifted, shifter);
  const Integers k = Sub(hn::BitCast(di, shifted), hn::BitCast(di, shifter));
  // t - k * ln 2 with ln 2 in two parts, within 0.35 of zero.
  Floats f = hn::NegMulAdd(kf, Splat(0x1.62e430p-1F), t);
  f = hn::NegMulAdd(kf, Splat(-0x1.05c610p-29F), f);
  if constexpr (!std::is_same_v<Low, Exact>) f = Add(f, low);
  // The Taylor series 1 + (f + f^2 * (1/2 + ...)), its terms in pairs: half the latency of Horner's
  // rule, on which this loop waits. The first neglected term is below 2^-27.
  const Floats square = Mul(f, f);
  const auto pair = [&](float low_term, float high_term)
                        HWY_ATTR { return MulAdd(Splat(high_term), f, Splat(low_term)); };
  Floats q = MulAdd(pair(1.0F / 720.0F, 1.0F / 5040.0F), square, pair(1.0F / 24.0F, 1.0F / 120.0F));
  q = MulAdd(q, square, pair(0.5F, 1.0F / 6.0F));
  return {Add(MulAdd(q, square, f), Splat(1.0F)), k};
}

// 2^k for -126 <= k <= 127.
HWY_INLINE Floats PowerOfTwo(Integers k) {
  const hn::RebindToSigned<FloatTag> di;
  return hn::BitCast(FloatTag(), hn::ShiftLeft<23>(Add(k, hn::Set(di, 127))));
}

class Sigmoid {
 public:
  HWY_INLINE explicit Sigmoid(Floats x) : Sigmoid(x, Exact()) {}
  template <class Low>
  HWY_INLINE Sigmoid(Floats x, Low low) {
    const Floats one = Splat(1.0F), lowest = Splat(-120.0F);
    const Floats minus_x = hn::Or(x, hn::SignBit(FloatTag()));
    const auto far = Lt(minus_x, lowest);
    const Floats t = IfThenElse(far, lowest, minus_x);
    const ScaledExp exp = [&]() HWY_ATTR {
      if constexpr (std::is_same_v<Low, Exact>) {
        return ExpOfNegative(t, low);
      } else {
        const Floats minus_low = hn::IfNegativeThenElse(x, low, Neg(low));
        return ExpOfNegative(t, IfThenZeroElse(far, minus_low));
      }
    }();
    const Integers half = hn::ShiftRight<1>(exp.exponent);
    const Floats rest = PowerOfTwo(Sub(exp.exponent, half));
    const Floats part = Mul(exp.mantissa, PowerOfTwo(half));
    const Floats e = Mul(part, rest);
    reciprocal_ = hn::Div(one, Add(one, e));
    numerator_ = hn::IfNegativeThenElse(x, IfThenZeroElse(far, part), one);
    scale_ = hn::IfNegativeThenElse(x, rest, one);
    complement_ = Mul(hn::IfNegativeThenElse(x, one, e), reciprocal_);
  }

  HWY_INLINE Floats times(Floats v) const {
    return Mul(Mul(Mul(v, numerator_), reciprocal_), scale_);
  }
  HWY_INLINE Floats complement() const { return complement_; }

 private:
  Floats numerator_, reciprocal_, scale_, complement_;
};

#define MOIRE_LANES HWY_INLINE
#include "core/activation.h"
#undef MOIRE_LANES

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
