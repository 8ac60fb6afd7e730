// The activations and their derivatives, h(a) * l(b), or h(a) where there is no gate, for every
// backend: the order of operations below is the contract, and this text is the only one that has
// it.
//
//   swiglu        x = a,          h = a * sigma,  h' = sigma * fma(a, 1 - sigma, 1),      l = b
//   clamped       g = min(a, limit), x = alpha * g,
//                 h = g * sigma,  h' = sigma * fma(x, 1 - sigma, 1),
//                 l = clamp(b, -limit, limit) + offset;
//                 grad_gate is 0 where a > limit, grad_up where |b| > limit
//   geglu_tanh    c = clamp(a, -32, 32), x = 2u = c * (c1 + c3 * c^2), h = a * sigma,
//                 h' = sigma * fma(c * fma(c^2, 3 * c3, c1), 1 - sigma, 1),               l = b
//   reglu         r = a with 0 for what is below, h = r, h' = 1,                            l = b
//   reglu2        h = r * r, h' = r + r,                                                    l = b
//                 of both: grad_gate is 0 where a <= 0
//   argument      x = hi + lo: a product (alpha * g, the cubic of GELU) keeps its rounding error in
//                 lo, because one unit in the last place of x = -80 is 64 of exp(x)
// NaN in a or b gives NaN. So does a = -inf, whose h is -inf * 0 (as in PyTorch).
//
// A backend includes this inside a namespace of its own, which says what it computes with: vectors
// on the CPU, once per SIMD target (hence no include guard), single floats on CUDA. It has
//   Floats                  one number, or a vector of them
//   Splat                   a float as Floats
//   Add, Sub, Mul, Neg, Abs, Gt, Lt, IfThenElse, IfThenZeroElse
//                           as Highway has them, each rounded by itself
//   MulAdd, MulSub          a * b + c and a * b - c, rounded once
//   Sigmoid                 of Floats x, or of x + low: times(v) is v * sigma, complement() is
//                           1 - sigma, each accurate where sigma is near 0 or 1
//   MOIRE_LANES             what functions on Floats are marked with
// and has included <moire.h> and core/host_device.h.

// `a` with NaN kept, at most `limit`, or not negative.
MOIRE_LANES Floats at_most(Floats a, Floats limit) { return IfThenElse(Gt(a, limit), limit, a); }
MOIRE_LANES Floats at_least_zero(Floats a) { return IfThenZeroElse(Lt(a, Splat(0.0F)), a); }
MOIRE_LANES Floats clamped(Floats a, Floats limit) {
  const Floats minus = Neg(limit);
  return IfThenElse(Lt(a, minus), minus, at_most(a, limit));
}
// h' / sigma of h = a * sigma(x), from a * dx/da.
MOIRE_LANES Floats slope_factor(Floats a_dx, const Sigmoid& sigma) {
  return MulAdd(a_dx, sigma.complement(), Splat(1.0F));
}

// Each activation has gate(a, slope) = h, with h' as the slope, up(b) = l, and pass_gate and
// pass_up, which keep a gradient where it passes and zero it elsewhere.
struct Unclamped {
  MOIRE_LANES Floats up(Floats b) const { return b; }
  MOIRE_LANES Floats pass_gate(Floats, Floats grad) const { return grad; }
  MOIRE_LANES Floats pass_up(Floats, Floats grad) const { return grad; }
};

struct Swiglu : Unclamped {
  MOIRE_LANES Floats gate(Floats a, Floats& slope) const {
    const Sigmoid sigma(a);
    slope = sigma.times(slope_factor(a, sigma));
    return sigma.times(a);
  }
};

struct ClampedSwiglu {
  MOIRE_HOST_DEVICE explicit ClampedSwiglu(const moire_activation& a)
      : limit(a.limit), alpha(a.alpha), offset(a.offset) {}

  MOIRE_LANES Floats gate(Floats a, Floats& slope) const {
    const Floats g = at_most(a, Splat(limit)), x = Mul(Splat(alpha), g);
    const Sigmoid sigma(x, MulSub(Splat(alpha), g, x));
    slope = sigma.times(slope_factor(x, sigma));
    return sigma.times(g);
  }
  MOIRE_LANES Floats up(Floats b) const { return Add(clamped(b, Splat(limit)), Splat(offset)); }
  MOIRE_LANES Floats pass_gate(Floats a, Floats grad) const {
    return IfThenZeroElse(Gt(a, Splat(limit)), grad);
  }
  MOIRE_LANES Floats pass_up(Floats b, Floats grad) const {
    return IfThenZeroElse(Gt(Abs(b), Splat(limit)), grad);
  }

  float limit, alpha, offset;
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

  MOIRE_LANES Floats gate(Floats a, Floats& slope) const {
    const Floats c = clamped(a, Splat(kLimit));
    const Sigmoid sigma = sigmoid_of(c);
    const Floats x_slope = MulAdd(Mul(c, c), Splat(3.0F * kC3High), Splat(kC1High));
    slope = sigma.times(slope_factor(Mul(c, x_slope), sigma));
    return sigma.times(a);
  }

 private:
  // sigma(c * (c1 + c3 * c^2)) with the argument in two floats: every product and the sum keep
  // their rounding errors.
  MOIRE_LANES static Sigmoid sigmoid_of(Floats c) {
    const Floats c1 = Splat(kC1High), c3 = Splat(kC3High);
    const Floats square = Mul(c, c);
    const Floats square_low = MulSub(c, c, square);
    const Floats cubic = Mul(square, c3);
    Floats cubic_low = MulSub(square, c3, cubic);
    cubic_low = MulAdd(square_low, c3, cubic_low);
    cubic_low = MulAdd(square, Splat(kC3Low), cubic_low);
    const Floats factor = Add(c1, cubic);
    const Floats part = Sub(factor, c1);
    Floats factor_low = Add(Sub(c1, Sub(factor, part)), Sub(cubic, part));
    factor_low = Add(factor_low, Add(cubic_low, Splat(kC1Low)));
    const Floats x = Mul(c, factor);
    return Sigmoid(x, MulAdd(c, factor_low, MulSub(c, factor, x)));
  }
};

template <int kPower>
struct Reglu : Unclamped {
  MOIRE_LANES Floats gate(Floats a, Floats& slope) const {
    const Floats r = at_least_zero(a);
    slope = kPower == 1 ? Splat(1.0F) : Add(r, r);
    return kPower == 1 ? r : Mul(r, r);
  }
  MOIRE_LANES Floats pass_gate(Floats a, Floats grad) const {
    return IfThenElse(Gt(a, Splat(0.0F)), grad, at_least_zero(a));
  }
};

// h(a) alone: l = 1.
template <class Gated>
struct Ungated : Gated {
  MOIRE_HOST_DEVICE explicit Ungated(const Gated& gated) : Gated(gated) {}
  MOIRE_LANES Floats up(Floats) const { return Splat(1.0F); }
};

// Calls f with the activation of that kind, which is one of a sigmoid unless kAll; on the host.
template <bool kAll = true, class F>
decltype(auto) with_activation(const moire_activation& activation, F&& f) {
  if constexpr (kAll) {
    if (activation.kind == MOIRE_REGLU) return f(Reglu<1>());
    if (activation.kind == MOIRE_REGLU2) return f(Reglu<2>());
  }
  if (activation.kind == MOIRE_CLAMPED_SWIGLU) return f(ClampedSwiglu(activation));
  if (activation.kind == MOIRE_GEGLU_TANH) return f(GegluTanh());
  return f(Swiglu());
}

// Not scaled by prob: act = glu_value * prob, rounded once.
template <class Activation>
MOIRE_LANES Floats glu_value(const Activation& activation, Floats gate, Floats up) {
  Floats slope;
  return Mul(activation.gate(gate, slope), activation.up(up));
}

struct GluGradient {
  Floats gate, up;
  Floats glu;  // glu_value again, for act and grad_prob
};

// gate, up and grad_act have been rounded to their storage type; prob is 1 where absent.
template <class Activation>
MOIRE_LANES GluGradient glu_gradient(const Activation& activation, Floats gate, Floats up,
                                     Floats grad_act, Floats prob) {
  Floats slope;
  const Floats h = activation.gate(gate, slope);
  const Floats l = activation.up(up);
  const Floats grad = Mul(grad_act, prob);
  return {activation.pass_gate(gate, Mul(Mul(grad, l), slope)),
          activation.pass_up(up, Mul(grad, h)), Mul(h, l)};
}
