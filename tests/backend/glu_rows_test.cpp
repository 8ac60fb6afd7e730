// The gated activations of one row segment, on every target that this machine runs: accuracy
// against double, layouts, and the same bits everywhere.
#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/backend/glu_rows_test.cpp"
#include <hwy/foreach_target.h>
// The inline headers come after foreach_target.h.
#include "backend/cpu/glu_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

void forward(const moire_activation& activation, const float* gate, const float* up, float prob,
             float* act, size_t n) {
  GluForwardSegment(activation, gate, up, prob, act, n);
}
float backward(const moire_activation& activation, const float* gate, const float* up,
               const float* grad_act, float prob, float* grad_gate, float* grad_up, float* act,
               size_t n) {
  return GluBackwardSegment(activation, gate, up, grad_act, prob, grad_gate, grad_up, act, n);
}
void load(const void* row, DType dtype, const ResolvedGluLayout& layout, int64_t first, size_t n,
          float* gate, float* up) {
  LoadGluSegment(row, dtype, layout, first, n, gate, up);
}
void store(const float* gate, const float* up, DType dtype, const ResolvedGluLayout& layout,
           int64_t first, size_t n, void* row) {
  StoreGluSegment(gate, up, dtype, layout, first, n, row);
}
float dot(const float* a, const float* b, size_t n) { return DotSegment(a, b, n); }

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <random>
#include <vector>

#include "core/float_environment.h"
#include "tests/backend/each_target.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(forward);
HWY_EXPORT(backward);
HWY_EXPORT(load);
HWY_EXPORT(store);
HWY_EXPORT(dot);

constexpr size_t kSize = 64;
// numerics: the activation in FP32 is within 8 units in the last place.
constexpr double kUlpBound = 8;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Segment {
  alignas(64) float v[kSize];
  explicit Segment(float fill = 0) {
    for (float& x : v) x = fill;
  }
};

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

// The unit in the last place of FP32 at |x|.
double ulp(double x) {
  const int exponent = x == 0 ? -149 : std::max(std::ilogb(x) - 23, -149);
  return std::ldexp(1.0, exponent);
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// h(a) and its derivative, from the definitions.
struct Truth {
  double h, slope, scale;  // `scale` bounds the two terms that add up to the slope
};
Truth truth(const moire_activation& activation, double a) {
  double g = a, x = a, x_slope = 1;
  if (activation.kind == MOIRE_CLAMPED_SWIGLU) {
    g = std::min(a, static_cast<double>(activation.limit));
    x = activation.alpha * g;
    x_slope = activation.alpha;
  } else if (activation.kind == MOIRE_GEGLU_TANH) {
    const double c = 2 * std::sqrt(2 / M_PI);
    x = c * (a + 0.044715 * a * a * a);
    x_slope = c * (1 + 3 * 0.044715 * a * a);
  }
  const double s = sigmoid(x), rest = sigmoid(-x);
  const double second = s == 0 || rest == 0 ? 0 : g * x_slope * rest;
  return {g * s, a > g ? 0 : s * (1 + second), s * (1 + std::abs(second))};
}

const moire_activation kActivations[] = {Activation::swiglu(), Activation::clamped_swiglu(),
                                         Activation::clamped_swiglu(2.5F, 0.7F, 0),
                                         Activation::geglu_tanh()};

// Every BF16 value, and floats of every exponent, dense where the activations bend.
std::vector<float> many_floats() {
  std::vector<float> out;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = bf16_to_float(static_cast<uint16_t>(bits));
    if (std::isfinite(x)) out.push_back(x);
  }
  const auto seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> wide(-130, 40), narrow(-12, 12);
  for (int i = 0; i < 300'000; ++i) {
    out.push_back(wide(random));
    out.push_back(narrow(random));
  }
  for (int i = 0; i < 200'000; ++i) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(x)) out.push_back(x);
  }
  while (out.size() % kSize != 0) out.push_back(0);
  return out;
}

// The largest error of h and of the slope, in ulp (of the terms' size for the slope).
struct Worst {
  double h = 0, slope = 0;
  float h_at = 0, slope_at = 0;
};
Worst worst_error(const moire_activation& activation, const std::vector<float>& in) {
  Worst worst;
  // up = 1 and no offset: act is h itself, grad_gate is the slope.
  moire_activation plain = activation;
  plain.offset = 0;
  const Segment ones(1);
  for (size_t i = 0; i < in.size(); i += kSize) {
    Segment gate, grad_gate, grad_up, act, again;
    std::memcpy(gate.v, &in[i], sizeof(gate.v));
    HWY_DYNAMIC_DISPATCH(forward)(plain, gate.v, ones.v, 1, act.v, kSize);
    HWY_DYNAMIC_DISPATCH(backward)
    (plain, gate.v, ones.v, ones.v, 1, grad_gate.v, grad_up.v, again.v, kSize);
    for (size_t j = 0; j < kSize; ++j) {
      EXPECT_EQ(bits_of(act.v[j]), bits_of(again.v[j])) << gate.v[j];
      EXPECT_EQ(bits_of(act.v[j]), bits_of(grad_up.v[j])) << gate.v[j];
      const Truth t = truth(activation, static_cast<double>(gate.v[j]));
      const double h = std::abs(act.v[j] - t.h) / ulp(t.h);
      const double slope = std::abs(grad_gate.v[j] - t.slope) / ulp(t.scale);
      if (!(h <= worst.h)) worst.h = h, worst.h_at = gate.v[j];
      if (!(slope <= worst.slope)) worst.slope = slope, worst.slope_at = gate.v[j];
    }
  }
  return worst;
}

TEST(GluRows, ActivationsAndTheirSlopesAreWithinEightUlpOverTheWholeRange) {
  const FloatEnvironment exact;
  const std::vector<float> in = many_floats();
  for (const moire_activation& activation : kActivations) {
    for_each_target([&] {
      const Worst worst = worst_error(activation, in);
      std::cout << "activation " << activation.kind << ": " << worst.h << " ulp at " << worst.h_at
                << ", slope " << worst.slope << " at " << worst.slope_at << "\n";
      EXPECT_LE(worst.h, kUlpBound) << "activation " << activation.kind << " at " << worst.h_at;
      EXPECT_LE(worst.slope, kUlpBound) << activation.kind << " at " << worst.slope_at;
    });
  }
}

}  // namespace
}  // namespace moire::cpu
#endif
