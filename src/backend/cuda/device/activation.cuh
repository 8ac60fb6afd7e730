// core/activation.h on single floats, with at most 8 ulp in h; a sigmoid below 2^-126 is 0. Every
// kernel that computes an activation calls glu_value or glu_gradient, so that fused and unfused
// results have the same bits. What NaN and infinities give is what they give on the CPU; a result
// in BF16 differs from the CPU's by one unit in the last place at most, because the sigmoid is made
// of the special function unit's approximations:
//
//   sigmoid       e = exp(-x); sigma = 1 / (1 + e), and 1 - sigma = e * sigma, not a difference
#pragma once

#include <moire.h>

#include <type_traits>

#include "backend/cuda/ptx/math.cuh"
#include "core/host_device.h"

namespace moire::cuda {
namespace activations {

using Floats = float;

__device__ inline float Splat(float x) { return x; }
__device__ inline float Add(float a, float b) { return a + b; }
__device__ inline float Sub(float a, float b) { return a - b; }
__device__ inline float Mul(float a, float b) { return a * b; }
__device__ inline float MulAdd(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline float MulSub(float a, float b, float c) { return fmaf(a, b, -c); }
__device__ inline float Neg(float a) { return -a; }
__device__ inline float Abs(float a) { return fabsf(a); }
__device__ inline bool Gt(float a, float b) { return a > b; }
__device__ inline bool Lt(float a, float b) { return a < b; }
__device__ inline float IfThenElse(bool mask, float a, float b) { return mask ? a : b; }
__device__ inline float IfThenZeroElse(bool mask, float a) { return mask ? 0.0F : a; }

// sigma(x + low), for low below one ulp of x; 0 where it is below the smallest normal number.
class Sigmoid {
 public:
  __device__ explicit Sigmoid(float x, float low = 0.0F) : e_(exp_minus(x, low)) {
    value_ = ptx::rcp_approx_ftz(1.0F + e_);
  }

  __device__ float times(float v) const { return v * value_; }
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

#define MOIRE_LANES __device__ inline
#include "core/activation.h"
#undef MOIRE_LANES

// An activation that is told apart at run time: a branch that all threads take alike, for kernels
// whose number would otherwise be three times what it is. One of a sigmoid unless kAll.
struct AnyActivation {
  moire_activation activation;
};

template <bool kAll = false, class F>
__device__ inline auto with_kind(const AnyActivation& any, F&& f) {
  const moire_activation& a = any.activation;
  if constexpr (kAll) {
    if (a.kind == MOIRE_REGLU) return f(Reglu<1>());
    if (a.kind == MOIRE_REGLU2) return f(Reglu<2>());
  }
  if (a.kind == MOIRE_CLAMPED_SWIGLU) return f(ClampedSwiglu(a));
  if (a.kind == MOIRE_GEGLU_TANH) return f(GegluTanh());
  return f(Swiglu());
}
__device__ inline float glu_value(const AnyActivation& any, float gate, float up) {
  return with_kind(any, [&](const auto& kind) { return glu_value(kind, gate, up); });
}
__device__ inline GluGradient glu_gradient(const AnyActivation& any, float gate, float up,
                                           float grad_act, float prob) {
  return with_kind(any,
                   [&](const auto& kind) { return glu_gradient(kind, gate, up, grad_act, prob); });
}

// Neighbouring columns, packed: gate and up become their gradients, and each column's part of
// grad_probs is added to its sum. Two at a time, which are read before either is written.
template <class Activation, class Pack, int N>
__device__ inline void glu_gradients(const Activation& activation, float prob, Pack& gate, Pack& up,
                                     const Pack& grad_act, Pack& act, float (&sums)[N]) {
  const auto gradient = [&](int i) {
    const float grad = grad_act[i];
    const GluGradient g = glu_gradient(activation, gate[i], up[i], grad, prob);
    sums[i] = fmaf(grad, g.glu, sums[i]);
    return g;
  };
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const GluGradient a = gradient(i), b = N == 1 ? a : gradient(i + 1);
    gate.set_two(i, a.gate, b.gate);
    up.set_two(i, a.up, b.up);
    act.set_two(i, a.glu * prob, b.glu * prob);
  }
}

// An activation or, where there is no gate, what is left of it.
template <bool kIsGated, class Gated>
using WithGating = std::conditional_t<kIsGated, const Gated&, Ungated<Gated>>;

}  // namespace activations

// Calls f with the activation of that kind, WithGating; on the device, and on the host.
template <bool kIsGated, class F>
__device__ inline void with_gating(const activations::AnyActivation& any, F&& f) {
  activations::with_kind<true>(any, [&]<class Gated>(const Gated& gated) {
    f(activations::WithGating<kIsGated, Gated>(gated));
  });
}
template <bool kIsGated, class F>
void with_gating(const moire_activation& activation, F&& f) {
  activations::with_activation(activation, [&]<class Gated>(const Gated& gated) {
    f(activations::WithGating<kIsGated, Gated>(gated));
  });
}

using activations::AnyActivation;
using activations::glu_gradient;
using activations::glu_gradients;
using activations::glu_value;
using activations::GluGradient;
using activations::with_activation;

}  // namespace moire::cuda
