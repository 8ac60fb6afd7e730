// The gated activations and their derivatives, h(a) * l(b), in FP32 with at most 8 ulp in h; a
// sigmoid below 2^-126 is 0. Every kernel that computes one calls glu_value or glu_gradient, so
// that fused and unfused results have the same bits. What NaN and infinities give is what they give
// on the CPU; a result in BF16 differs from the CPU's by one unit in the last place at most.
//
//   sigmoid       e = exp(-x); sigma = 1 / (1 + e), and 1 - sigma = e * sigma, not a difference
//   argument      x = hi + lo: a product (alpha * g, the cubic of GELU) keeps its rounding error in
//                 lo, because one unit in the last place of x = -80 is 64 of exp(x)
//   swiglu        x = a,          h = a * sigma,  h' = sigma * fma(a, 1 - sigma, 1),      l = b
//   clamped       g = min(a, limit), x = alpha * g,
//                 h = g * sigma,  h' = sigma * fma(x, 1 - sigma, 1),
//                 l = clamp(b, -limit, limit) + offset;
//                 grad_gate is 0 where a > limit, grad_up where |b| > limit
//   geglu_tanh    c = clamp(a, -32, 32), x = 2u = c * (c1 + c3 * c^2), h = a * sigma,
//                 h' = sigma * fma(c * fma(c^2, 3 * c3, c1), 1 - sigma, 1),               l = b
#pragma once

#include <moire.h>

#include <utility>

#include "backend/cuda/ptx/math.cuh"

namespace moire::cuda {

// sigma(x + low), for low below one ulp of x; 0 where it is below the smallest normal number.
class Sigmoid {
 public:
  __device__ explicit Sigmoid(float x, float low = 0.0F) : e_(exp_minus(x, low)) {
    value_ = ptx::rcp_approx_ftz(1.0F + e_);
  }

  // v * sigma.
  __device__ float times(float v) const { return v * value_; }
  // 1 - sigma.
  __device__ float complement() const { return e_ * value_; }

 private:
  __device__ static float exp_minus(float x, float low) {
    // ln(2) in two parts: what log2(e), rounded, and its product leave behind is added to the
    // result, for one ulp of the exponent 100 is 2^-17.
    constexpr float kLog2e = 0x1.715476p+0F;
    constexpr float kLn2 = 0x1.62e430p-1F, kLn2Low = -0x1.05c610p-29F;
    // Where exp is 0, and where its reciprocal is; it stays finite. NaN comes back with v.
    constexpr float kLowest = -127.0F, kHighest = 88.0F;
    const float t = fminf(fmaxf(-x, kLowest), kHighest);
    const float whole = t * kLog2e;
    float rest = fmaf(whole, -kLn2Low, fmaf(whole, -kLn2, t));
    rest -= low;
    const float power = ptx::ex2_approx_ftz(whole);
    return fmaf(power, rest, power);
  }

  float e_, value_;
};

// `a` with NaN kept, at most `limit`.
__device__ inline float at_most(float a, float limit) { return a > limit ? limit : a; }
__device__ inline float clamped(float a, float limit) {
  return a < -limit ? -limit : at_most(a, limit);
}

// Each activation has gate(a) = h, gate_with_slope(a), which also gives h', up(b) = l, and
// passes_gate and passes_up, which say where the clamps let a gradient pass.
struct Swiglu {
  __host__ __device__ explicit Swiglu(const moire_activation&) {}

  __device__ float gate(float a) const { return Sigmoid(a).times(a); }
  __device__ float gate_with_slope(float a, float& slope) const {
    const Sigmoid sigma(a);
    slope = sigma.times(fmaf(a, sigma.complement(), 1.0F));
    return sigma.times(a);
  }
  __device__ float up(float b) const { return b; }
  __device__ bool passes_gate(float) const { return true; }
  __device__ bool passes_up(float) const { return true; }
};

struct ClampedSwiglu {
  __host__ __device__ explicit ClampedSwiglu(const moire_activation& a)
      : limit(a.limit), alpha(a.alpha), offset(a.offset) {}

  __device__ float gate(float a) const {
    const float g = at_most(a, limit);
    return sigmoid_of(g).times(g);
  }
  __device__ float gate_with_slope(float a, float& slope) const {
    const float g = at_most(a, limit);
    const Sigmoid sigma = sigmoid_of(g);
    slope = sigma.times(fmaf(alpha * g, sigma.complement(), 1.0F));
    return sigma.times(g);
  }
  __device__ float up(float b) const { return clamped(b, limit) + offset; }
  __device__ bool passes_gate(float a) const { return !(a > limit); }
  __device__ bool passes_up(float b) const { return !(fabsf(b) > limit); }

  float limit, alpha, offset;

 private:
  __device__ Sigmoid sigmoid_of(float g) const {
    const float x = alpha * g;
    return Sigmoid(x, fmaf(alpha, g, -x));
  }
};

struct GegluTanh {
  static constexpr double kC1 = 1.5957691216057308;  // 2 * sqrt(2 / pi)
  static constexpr double kC3 = kC1 * 0.044715;
  static constexpr float kC1High = static_cast<float>(kC1);
  static constexpr float kC1Low = static_cast<float>(kC1 - static_cast<double>(kC1High));
  static constexpr float kC3High = static_cast<float>(kC3);
  static constexpr float kC3Low = static_cast<float>(kC3 - static_cast<double>(kC3High));
  // Past this, sigma is 0 or 1; the square of a larger number could overflow.
  static constexpr float kLimit = 32.0F;

  __host__ __device__ explicit GegluTanh(const moire_activation&) {}

  __device__ float gate(float a) const { return sigmoid_of(clamped(a, kLimit)).times(a); }
  __device__ float gate_with_slope(float a, float& slope) const {
    const float c = clamped(a, kLimit);
    const Sigmoid sigma = sigmoid_of(c);
    const float x_slope = fmaf(c * c, 3.0F * kC3High, kC1High);
    slope = sigma.times(fmaf(c * x_slope, sigma.complement(), 1.0F));
    return sigma.times(a);
  }
  __device__ float up(float b) const { return b; }
  __device__ bool passes_gate(float) const { return true; }
  __device__ bool passes_up(float) const { return true; }

 private:
  // sigma(c * (c1 + c3 * c^2)) with the argument in two floats: every product and the sum keep
  // their rounding errors.
  __device__ static Sigmoid sigmoid_of(float c) {
    const float square = c * c;
    const float square_low = fmaf(c, c, -square);
    const float cubic = square * kC3High;
    float cubic_low = fmaf(square, kC3High, -cubic);
    cubic_low = fmaf(square_low, kC3High, cubic_low);
    cubic_low = fmaf(square, kC3Low, cubic_low);
    const float factor = kC1High + cubic;
    const float part = factor - kC1High;
    float factor_low = (kC1High - (factor - part)) + (cubic - part);
    factor_low = factor_low + (cubic_low + kC1Low);
    const float x = c * factor;
    return Sigmoid(x, fmaf(c, factor_low, fmaf(c, factor, -x)));
  }
};

// Calls f with the activation of that kind; on the host, to choose a kernel.
template <class F>
decltype(auto) with_activation(const moire_activation& activation, F&& f) {
  if (activation.kind == MOIRE_CLAMPED_SWIGLU) return f(ClampedSwiglu(activation));
  if (activation.kind == MOIRE_GEGLU_TANH) return f(GegluTanh(activation));
  return f(Swiglu(activation));
}

// Not scaled by prob: act = glu_value * prob, rounded once.
template <class Activation>
__device__ inline float glu_value(const Activation& activation, float gate, float up) {
  return activation.gate(gate) * activation.up(up);
}

struct GluGradient {
  float gate, up;
  float glu;  // glu_value again, for act and grad_prob
};

// gate, up and grad_act have been rounded to their storage type; prob is 1 where absent.
template <class Activation>
__device__ inline GluGradient glu_gradient(const Activation& activation, float gate, float up,
                                           float grad_act, float prob) {
  float slope;
  const float h = activation.gate_with_slope(gate, slope);
  const float l = activation.up(up);
  const float grad = grad_act * prob;
  return {.gate = activation.passes_gate(gate) ? grad * l * slope : 0.0F,
          .up = activation.passes_up(up) ? grad * h : 0.0F,
          .glu = h * l};
}

// Any of them, told apart at run time: a branch that all threads take alike, for kernels whose
// number would otherwise be three times what it is.
struct AnyActivation {
  moire_activation activation;
};

__device__ inline float glu_value(const AnyActivation& any, float gate, float up) {
  const moire_activation& a = any.activation;
  if (a.kind == MOIRE_CLAMPED_SWIGLU) return glu_value(ClampedSwiglu(a), gate, up);
  if (a.kind == MOIRE_GEGLU_TANH) return glu_value(GegluTanh(a), gate, up);
  return glu_value(Swiglu(a), gate, up);
}
__device__ inline GluGradient glu_gradient(const AnyActivation& any, float gate, float up,
                                           float grad_act, float prob) {
  const moire_activation& a = any.activation;
  if (a.kind == MOIRE_CLAMPED_SWIGLU) {
    return glu_gradient(ClampedSwiglu(a), gate, up, grad_act, prob);
  }
  if (a.kind == MOIRE_GEGLU_TANH) return glu_gradient(GegluTanh(a), gate, up, grad_act, prob);
  return glu_gradient(Swiglu(a), gate, up, grad_act, prob);
}

}  // namespace moire::cuda
