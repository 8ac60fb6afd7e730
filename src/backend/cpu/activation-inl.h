// The gated activations and their derivatives on vectors of floats: h(a) * l(b), with at most 8 ulp
// in h over the whole range, results near underflow included. The order of operations below is the
// contract: every target gives the same bits, and another backend that follows it differs by
// nothing that a BF16 result shows by more than one unit in the last place.
//
//   sigmoid       e = exp(-|x|); r = 1 / (1 + e); sigma = (x < 0 ? e : 1) * r, and
//                 1 - sigma = (x < 0 ? 1 : e) * r, neither by a difference
//   v * sigma     for x < 0, e = p * 2^k is not formed, lest it lose bits to underflow:
//                 ((v * (p * 2^floor(k / 2))) * r) * 2^(k - floor(k / 2)); for x >= 0, v * r.
//                 Below x = -120 it is v * 0
//   argument      x = hi + lo: a product (alpha * g, the cubic of GELU) keeps its rounding error in
//                 lo, because one unit in the last place of x = -80 is 64 of exp(x)
//   swiglu        x = a,          h = a * sigma,  h' = sigma * fma(a, 1 - sigma, 1),      l = b
//   clamped       g = min(a, limit), x = alpha * g,
//                 h = g * sigma,  h' = sigma * fma(x, 1 - sigma, 1),
//                 l = clamp(b, -limit, limit) + offset;
//                 grad_gate is 0 where a > limit, grad_up where |b| > limit
//   geglu_tanh    c = clamp(a, -32, 32), x = 2u = c * (c1 + c3 * c^2), h = a * sigma,
//                 h' = sigma * fma(c * fma(c^2, 3 * c3, c1), 1 - sigma, 1),               l = b
// NaN in a or b gives NaN. So does a = -inf, whose h is -inf * 0 (as in PyTorch).
#include "backend/cpu/convert-inl.h"

#if defined(MOIRE_ACTIVATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_ACTIVATION_INL_H_
#undef MOIRE_ACTIVATION_INL_H_
#else
#define MOIRE_ACTIVATION_INL_H_
#endif

#include <moire/glu.h>

#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {

// exp(t) as mantissa * 2^exponent, so that the caller decides where it underflows.
template <class D>
struct ScaledExp {
  hn::VFromD<D> mantissa;                      // 0.70 to 1.42, error below 1 ulp
  hn::VFromD<hn::RebindToSigned<D>> exponent;  // at least -175
};

// The low part of an argument that has none.
struct Exact {};

// exp(t + low) for -120 <= t <= 0 and low below one ulp of t. NaN goes to the mantissa.
template <class D, class Low>
HWY_INLINE ScaledExp<D> ExpOfNegative(D d, hn::VFromD<D> t, Low low) {
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const hn::RebindToSigned<D> di;
  const auto shifter = hn::Set(d, 0x1.8p+23F);
  const auto shifted = hn::MulAdd(t, hn::Set(d, 0x1.715476p+0F), shifter);  // log2(e)
  const auto kf = hn::Sub(shifted, shifter);
  const auto k = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, shifter));
  // t - k * ln 2 with ln 2 in two parts, within 0.35 of zero.
  auto f = hn::NegMulAdd(kf, hn::Set(d, 0x1.62e430p-1F), t);
  f = hn::NegMulAdd(kf, hn::Set(d, -0x1.05c610p-29F), f);
  if constexpr (!std::is_same_v<Low, Exact>) f = hn::Add(f, low);
  // The Taylor series 1 + (f + f^2 * (1/2 + ...)), its terms in pairs: half the latency of Horner's
  // rule, on which this loop waits. The first neglected term is below 2^-27.
  const auto square = hn::Mul(f, f);
  const auto pair = [&](float low_term, float high_term) HWY_ATTR {
    return hn::MulAdd(hn::Set(d, high_term), f, hn::Set(d, low_term));
  };
  auto q =
      hn::MulAdd(pair(1.0F / 720.0F, 1.0F / 5040.0F), square, pair(1.0F / 24.0F, 1.0F / 120.0F));
  q = hn::MulAdd(q, square, pair(0.5F, 1.0F / 6.0F));
  const auto p = hn::Add(hn::MulAdd(q, square, f), hn::Set(d, 1.0F));
  return {p, k};
}

// 2^k for -126 <= k <= 127.
template <class D>
HWY_INLINE hn::VFromD<D> PowerOfTwo(D d, hn::VFromD<hn::RebindToSigned<D>> k) {
  const hn::RebindToSigned<D> di;
  return hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(k, hn::Set(di, 127))));
}

template <class D>
class Sigmoid {
 public:
  using V = hn::VFromD<D>;

  // sigma(x + low); Low is V or Exact.
  template <class Low>
  HWY_INLINE Sigmoid(D d, V x, Low low) {
    const auto one = hn::Set(d, 1.0F), lowest = hn::Set(d, -120.0F);
    const auto minus_x = hn::Or(x, hn::SignBit(d));
    const auto far = hn::Lt(minus_x, lowest);
    const auto t = hn::IfThenElse(far, lowest, minus_x);
    const ScaledExp<D> exp = [&]() HWY_ATTR {
      if constexpr (std::is_same_v<Low, Exact>) {
        return ExpOfNegative(d, t, low);
      } else {
        const auto minus_low = hn::IfNegativeThenElse(x, low, hn::Neg(low));
        return ExpOfNegative(d, t, hn::IfThenZeroElse(far, minus_low));
      }
    }();
    const auto half = hn::ShiftRight<1>(exp.exponent);
    const auto rest = PowerOfTwo(d, hn::Sub(exp.exponent, half));
    const auto part = hn::Mul(exp.mantissa, PowerOfTwo(d, half));
    const auto e = hn::Mul(part, rest);
    reciprocal_ = hn::Div(one, hn::Add(one, e));
    numerator_ = hn::IfNegativeThenElse(x, hn::IfThenZeroElse(far, part), one);
    scale_ = hn::IfNegativeThenElse(x, rest, one);
    complement_ = hn::Mul(hn::IfNegativeThenElse(x, one, e), reciprocal_);
  }

  // v * sigma.
  HWY_INLINE V Times(V v) const {
    return hn::Mul(hn::Mul(hn::Mul(v, numerator_), reciprocal_), scale_);
  }
  // 1 - sigma.
  HWY_INLINE V Complement() const { return complement_; }

 private:
  V numerator_, reciprocal_, scale_, complement_;
};

// `a` with NaN kept, at most `limit`.
template <class D>
HWY_INLINE hn::VFromD<D> AtMost(D, hn::VFromD<D> a, hn::VFromD<D> limit) {
  return hn::IfThenElse(hn::Gt(a, limit), limit, a);
}
template <class D>
HWY_INLINE hn::VFromD<D> Clamped(D d, hn::VFromD<D> a, hn::VFromD<D> limit) {
  const auto minus = hn::Neg(limit);
  return hn::IfThenElse(hn::Lt(a, minus), minus, AtMost(d, a, limit));
}

// Each activation has Gate(a) = h, GateWithSlope(a), which also gives h', Up(b) = l, and PassGate
// and PassUp, which keep a gradient where the clamps let it pass and zero it elsewhere.
struct Unclamped {
  template <class D, class V>
  HWY_INLINE V Up(D, V b) const {
    return b;
  }
  template <class D, class V>
  HWY_INLINE V PassGate(D, V, V grad) const {
    return grad;
  }
  template <class D, class V>
  HWY_INLINE V PassUp(D, V, V grad) const {
    return grad;
  }
};

struct Swiglu : Unclamped {
  explicit Swiglu(const moire_activation&) {}

  template <class D, class V>
  HWY_INLINE V Gate(D d, V a) const {
    return Sigmoid<D>(d, a, Exact()).Times(a);
  }
  template <class D, class V>
  HWY_INLINE V GateWithSlope(D d, V a, V& slope) const {
    const Sigmoid<D> sigma(d, a, Exact());
    slope = sigma.Times(hn::MulAdd(a, sigma.Complement(), hn::Set(d, 1.0F)));
    return sigma.Times(a);
  }
};

struct ClampedSwiglu {
  explicit ClampedSwiglu(const moire_activation& a)
      : limit(a.limit), alpha(a.alpha), offset(a.offset) {}

  template <class D, class V>
  HWY_INLINE V Gate(D d, V a) const {
    const V g = AtMost(d, a, hn::Set(d, limit));
    return SigmoidOf(d, g).Times(g);
  }
  template <class D, class V>
  HWY_INLINE V GateWithSlope(D d, V a, V& slope) const {
    const V g = AtMost(d, a, hn::Set(d, limit));
    const V x = hn::Mul(hn::Set(d, alpha), g);
    const Sigmoid<D> sigma = SigmoidOf(d, g);
    slope = sigma.Times(hn::MulAdd(x, sigma.Complement(), hn::Set(d, 1.0F)));
    return sigma.Times(g);
  }
  template <class D, class V>
  HWY_INLINE V Up(D d, V b) const {
    return hn::Add(Clamped(d, b, hn::Set(d, limit)), hn::Set(d, offset));
  }
  template <class D, class V>
  HWY_INLINE V PassGate(D d, V a, V grad) const {
    return hn::IfThenZeroElse(hn::Gt(a, hn::Set(d, limit)), grad);
  }
  template <class D, class V>
  HWY_INLINE V PassUp(D d, V b, V grad) const {
    return hn::IfThenZeroElse(hn::Gt(hn::Abs(b), hn::Set(d, limit)), grad);
  }

  float limit, alpha, offset;

 private:
  template <class D, class V>
  HWY_INLINE Sigmoid<D> SigmoidOf(D d, V g) const {
    const V x = hn::Mul(hn::Set(d, alpha), g);
    return Sigmoid<D>(d, x, hn::MulSub(hn::Set(d, alpha), g, x));
  }
};

struct GegluTanh : Unclamped {
  static constexpr double kC1 = 1.5957691216057308;  // 2 * sqrt(2 / pi)
  static constexpr double kC3 = kC1 * 0.044715;
  static constexpr float kC1High = static_cast<float>(kC1);
  static constexpr float kC1Low = static_cast<float>(kC1 - static_cast<double>(kC1High));
  static constexpr float kC3High = static_cast<float>(kC3);
  static constexpr float kC3Low = static_cast<float>(kC3 - static_cast<double>(kC3High));
  // Past this, sigma is 0 or 1; the square of a larger number could overflow.
  static constexpr float kLimit = 32.0F;

  explicit GegluTanh(const moire_activation&) {}

  template <class D, class V>
  HWY_INLINE V Gate(D d, V a) const {
    return SigmoidOf(d, Clamped(d, a, hn::Set(d, kLimit))).Times(a);
  }
  template <class D, class V>
  HWY_INLINE V GateWithSlope(D d, V a, V& slope) const {
    const V c = Clamped(d, a, hn::Set(d, kLimit));
    const Sigmoid<D> sigma = SigmoidOf(d, c);
    const V x_slope = hn::MulAdd(hn::Mul(c, c), hn::Set(d, 3.0F * kC3High), hn::Set(d, kC1High));
    slope = sigma.Times(hn::MulAdd(hn::Mul(c, x_slope), sigma.Complement(), hn::Set(d, 1.0F)));
    return sigma.Times(a);
  }

 private:
  // sigma(c * (c1 + c3 * c^2)) with the argument in two floats: every product and the sum keep
  // their rounding errors.
  template <class D, class V>
  HWY_INLINE Sigmoid<D> SigmoidOf(D d, V c) const {
    const V c1 = hn::Set(d, kC1High), c3 = hn::Set(d, kC3High);
    const V square = hn::Mul(c, c);
    const V square_low = hn::MulSub(c, c, square);
    const V cubic = hn::Mul(square, c3);
    V cubic_low = hn::MulSub(square, c3, cubic);
    cubic_low = hn::MulAdd(square_low, c3, cubic_low);
    cubic_low = hn::MulAdd(square, hn::Set(d, kC3Low), cubic_low);
    const V factor = hn::Add(c1, cubic);
    const V part = hn::Sub(factor, c1);
    V factor_low = hn::Add(hn::Sub(c1, hn::Sub(factor, part)), hn::Sub(cubic, part));
    factor_low = hn::Add(factor_low, hn::Add(cubic_low, hn::Set(d, kC1Low)));
    const V x = hn::Mul(c, factor);
    const V x_low = hn::MulAdd(c, factor_low, hn::MulSub(c, factor, x));
    return Sigmoid<D>(d, x, x_low);
  }
};

// Calls f with the activation of that kind.
template <class F>
HWY_INLINE decltype(auto) with_activation(const moire_activation& activation, F&& f) {
  if (activation.kind == MOIRE_CLAMPED_SWIGLU) return f(ClampedSwiglu(activation));
  if (activation.kind == MOIRE_GEGLU_TANH) return f(GegluTanh(activation));
  return f(Swiglu(activation));
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
