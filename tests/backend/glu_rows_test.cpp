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

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iostream>
#include <limits>
#include <random>
#include <vector>

#include "core/float_environment.h"
#include "tests/backend/each_target.h"
#include "tests/backend/hard_floats.h"
#include "tests/support/random.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(forward);
HWY_EXPORT(backward);
HWY_EXPORT(load);
HWY_EXPORT(store);

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

// Those of a sigmoid; the others are exact, or rounded once.
const moire_activation kActivations[] = {Activation::swiglu(), Activation::clamped_swiglu(),
                                         Activation::clamped_swiglu(2.5F, 0.7F, 0),
                                         Activation::geglu_tanh()};

// Every BF16 value, and floats of every exponent, dense where the activations bend.
std::vector<float> many_floats(std::mt19937_64& random) {
  std::vector<float> out;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = bf16_to_float(static_cast<uint16_t>(bits));
    if (std::isfinite(x)) out.push_back(x);
  }
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
  test::Random random;
  const std::vector<float> in = many_floats(random.engine());
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

// The order of operations that core/activation.h and glu_rows-inl.h promise, one scalar at a time.
namespace scalar {

struct Sigmoid {
  float numerator, reciprocal, scale, complement;
  float times(float v) const { return ((v * numerator) * reciprocal) * scale; }
};

Sigmoid sigmoid_of(float x, float low) {
  const bool negative = x < 0, far = -std::abs(x) < -120.0F;
  const float t = far ? -120.0F : -std::abs(x), t_low = far ? 0 : negative ? low : -low;
  const float kf = std::fma(t, 0x1.715476p+0F, 0x1.8p+23F) - 0x1.8p+23F;
  float f = std::fma(-kf, 0x1.62e430p-1F, t);
  f = std::fma(-kf, -0x1.05c610p-29F, f) + t_low;
  const auto pair = [&](float c, float c_next) { return std::fma(c_next, f, c); };
  const float square = f * f;
  float q = std::fma(pair(1.0F / 720, 1.0F / 5040), square, pair(1.0F / 24, 1.0F / 120));
  q = std::fma(q, square, pair(0.5F, 1.0F / 6));
  const float p = std::fma(q, square, f) + 1;
  const int k = static_cast<int>(kf), half = k >> 1;
  const float part = p * std::ldexp(1.0F, half), rest = std::ldexp(1.0F, k - half);
  const float e = part * rest, r = 1 / (1 + e);
  return {negative ? (far ? 0 : part) : 1, r, negative ? rest : 1, (negative ? 1 : e) * r};
}

struct Gate {
  float h, slope;
};

Gate gate_of(const moire_activation& activation, float a) {
  if (activation.kind == MOIRE_CLAMPED_SWIGLU) {
    const float g = a > activation.limit ? activation.limit : a, x = activation.alpha * g;
    const Sigmoid s = sigmoid_of(x, std::fma(activation.alpha, g, -x));
    return {s.times(g), s.times(std::fma(x, s.complement, 1.0F))};
  }
  if (activation.kind == MOIRE_GEGLU_TANH) {
    constexpr double kC1 = 1.5957691216057308, kC3 = kC1 * 0.044715;
    const auto c1 = static_cast<float>(kC1), c3 = static_cast<float>(kC3);
    const auto c1_low = static_cast<float>(kC1 - static_cast<double>(c1));
    const auto c3_low = static_cast<float>(kC3 - static_cast<double>(c3));
    const float c = std::clamp(a, -32.0F, 32.0F);
    const float square = c * c, square_low = std::fma(c, c, -square);
    const float cubic = square * c3;
    float cubic_low = std::fma(square_low, c3, std::fma(square, c3, -cubic));
    cubic_low = std::fma(square, c3_low, cubic_low);
    const float factor = c1 + cubic, part = factor - c1;
    const float factor_low = ((c1 - (factor - part)) + (cubic - part)) + (cubic_low + c1_low);
    const float x = c * factor;
    const Sigmoid s = sigmoid_of(x, std::fma(c, factor_low, std::fma(c, factor, -x)));
    const float x_slope = std::fma(square, 3.0F * c3, c1);
    return {s.times(a), s.times(std::fma(c * x_slope, s.complement, 1.0F))};
  }
  if (activation.kind == MOIRE_REGLU) return {a < 0 ? 0 : a, 1};
  if (activation.kind == MOIRE_REGLU2) {
    const float r = a < 0 ? 0 : a;
    return {r * r, r + r};
  }
  const Sigmoid s = sigmoid_of(a, 0);
  return {s.times(a), s.times(std::fma(a, s.complement, 1.0F))};
}

float up_of(const moire_activation& activation, float b) {
  if (activation.kind != MOIRE_CLAMPED_SWIGLU) return b;
  return std::clamp(b, -activation.limit, activation.limit) + activation.offset;
}

bool gate_passes(const moire_activation& activation, float a) {
  if (activation.kind >= MOIRE_REGLU) return a > 0;
  return activation.kind != MOIRE_CLAMPED_SWIGLU || a <= activation.limit;
}

}  // namespace scalar

float scalar_dot(const float* a, const float* b, size_t n) {
  float lanes[16] = {};
  for (size_t j = 0; j < n; ++j) lanes[j % 16] = std::fma(a[j], b[j], lanes[j % 16]);
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Random values of a few sizes, zero past n as loading leaves them.
Segment random_segment(std::mt19937_64& random, size_t n) {
  Segment s;
  std::normal_distribution<float> normal;
  for (size_t j = 0; j < n; ++j) s.v[j] = normal(random) * (j % 7 == 0 ? 30.0F : 2.0F);
  return s;
}

TEST(GluRows, HaveTheBitsOfTheirOrderOfOperationsOnEveryTarget) {
  const FloatEnvironment exact;
  test::Random fresh;
  for_each_target([&] {
    std::mt19937_64 random = fresh.engine();  // the same inputs on every target
    for (int repeat = 0; repeat < 2000; ++repeat) {
      const moire_activation others[] = {Activation::reglu(), Activation::reglu2()};
      const moire_activation activation =
          repeat % 6 < 4 ? kActivations[repeat % 6] : others[repeat % 2];
      const size_t n = repeat % 3 == 0 ? kSize : 1 + random() % kSize;
      const Segment gate = random_segment(random, n), up = random_segment(random, n);
      const Segment grad = random_segment(random, n);
      const float prob = random_segment(random, 1).v[0];
      Segment act, again, grad_gate, grad_up, glu;
      HWY_DYNAMIC_DISPATCH(forward)(activation, gate.v, up.v, prob, act.v, n);
      const float grad_prob = HWY_DYNAMIC_DISPATCH(backward)(activation, gate.v, up.v, grad.v, prob,
                                                             grad_gate.v, grad_up.v, again.v, n);
      for (size_t j = 0; j < n; ++j) {
        const float a = gate.v[j], b = up.v[j];
        const scalar::Gate s = scalar::gate_of(activation, a);
        const float l = scalar::up_of(activation, b);
        const bool gate_passes = scalar::gate_passes(activation, a);
        const bool up_passes =
            activation.kind != MOIRE_CLAMPED_SWIGLU || std::abs(b) <= activation.limit;
        const float d = grad.v[j] * prob;
        glu.v[j] = s.h * l;
        ASSERT_EQ(bits_of(act.v[j]), bits_of(glu.v[j] * prob)) << a << " " << b;
        ASSERT_EQ(bits_of(again.v[j]), bits_of(act.v[j]));
        ASSERT_EQ(bits_of(grad_up.v[j]), bits_of(up_passes ? d * s.h : 0)) << a << " " << b;
        ASSERT_EQ(bits_of(grad_gate.v[j]), bits_of(gate_passes ? (d * l) * s.slope : 0)) << a;
      }
      ASSERT_EQ(bits_of(grad_prob), bits_of(scalar_dot(grad.v, glu.v, n))) << n;
    }
  });
}

TEST(GluRows, WithoutAGateHaveTheBitsOfAnUpOfOneAndTouchNoUp) {
  const FloatEnvironment exact;
  test::Random fresh;
  for_each_target([&] {
    std::mt19937_64 random = fresh.engine();
    for (const moire_activation& activation :
         {Activation::swiglu(), Activation::clamped_swiglu(2.5F, 0.7F, 0), Activation::geglu_tanh(),
          Activation::reglu(), Activation::reglu2()}) {
      for (const size_t n : {size_t{1}, size_t{19}, kSize}) {
        const Segment gate = random_segment(random, n), grad = random_segment(random, n), ones(1);
        Segment act, plain_act, again, plain_again, by_gate, plain_by_gate, by_up, untouched(kNaN);
        HWY_DYNAMIC_DISPATCH(forward)(activation, gate.v, ones.v, 0.7F, act.v, n);
        HWY_DYNAMIC_DISPATCH(forward)(activation, gate.v, nullptr, 0.7F, plain_act.v, n);
        const float dot = HWY_DYNAMIC_DISPATCH(backward)(activation, gate.v, ones.v, grad.v, 0.7F,
                                                         by_gate.v, by_up.v, again.v, n);
        const float plain_dot =
            HWY_DYNAMIC_DISPATCH(backward)(activation, gate.v, nullptr, grad.v, 0.7F,
                                           plain_by_gate.v, untouched.v, plain_again.v, n);
        EXPECT_EQ(bits_of(dot), bits_of(plain_dot));
        for (size_t j = 0; j < n; ++j) {
          ASSERT_EQ(bits_of(act.v[j]), bits_of(plain_act.v[j])) << activation.kind;
          ASSERT_EQ(bits_of(again.v[j]), bits_of(plain_again.v[j])) << activation.kind;
          ASSERT_EQ(bits_of(by_gate.v[j]), bits_of(plain_by_gate.v[j])) << activation.kind;
          ASSERT_TRUE(std::isnan(untouched.v[j]));
        }
      }
    }
  });
}

TEST(GluRows, ReluPassesNoGradientAtZeroOrBelowAndKeepsNaN) {
  const FloatEnvironment exact;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for_each_target([&] {
    for (const moire_activation& activation : {Activation::reglu(), Activation::reglu2()}) {
      Segment gate, grad(kInf), act, grad_gate, grad_up;
      const float in[] = {kNaN, -kInf, -2, -0.0F, 0, 0x1p-149F, 3, kInf};
      std::copy(std::begin(in), std::end(in), gate.v);
      HWY_DYNAMIC_DISPATCH(backward)
      (activation, gate.v, nullptr, grad.v, 1, grad_gate.v, grad_up.v, act.v, 8);
      EXPECT_TRUE(std::isnan(act.v[0]));
      EXPECT_TRUE(std::isnan(grad_gate.v[0]));
      for (size_t j = 1; j < 5; ++j) {
        EXPECT_EQ(act.v[j], 0) << in[j];
        EXPECT_EQ(grad_gate.v[j], 0) << in[j];
      }
      const bool is_squared = activation.kind == MOIRE_REGLU2;
      EXPECT_EQ(act.v[6], is_squared ? 9 : 3);
      EXPECT_EQ(act.v[7], kInf);
      for (size_t j = 5; j < 8; ++j) EXPECT_EQ(grad_gate.v[j], kInf) << in[j];
    }
  });
}

TEST(GluRows, SpecialValuesComeOutAsTheContractSays) {
  const FloatEnvironment exact;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for_each_target([&] {
    for (const moire_activation& activation : kActivations) {
      Segment gate, act;
      const Segment ones(1);
      const float in[] = {kNaN, -kInf, kInf, 0, -0.0F, -3e38F, 3e38F};
      std::copy(std::begin(in), std::end(in), gate.v);
      moire_activation plain = activation;
      plain.offset = 0;
      HWY_DYNAMIC_DISPATCH(forward)(plain, gate.v, ones.v, 1, act.v, 7);
      const bool clamps = activation.kind == MOIRE_CLAMPED_SWIGLU;
      EXPECT_TRUE(std::isnan(act.v[0]));
      EXPECT_TRUE(std::isnan(act.v[1]));
      EXPECT_TRUE(clamps || act.v[2] == kInf);
      EXPECT_EQ(bits_of(act.v[3]), bits_of(0.0F));
      EXPECT_EQ(bits_of(act.v[4]), bits_of(-0.0F));
      EXPECT_EQ(act.v[5], 0.0F);
      EXPECT_TRUE(clamps || act.v[6] == 3e38F);
    }
  });
}

// Every layout, dtype and length, against positions from glu_layout.h.
void check_segment(DType dtype, const ResolvedGluLayout& layout, int64_t first, size_t n) {
  const auto columns = static_cast<size_t>(layout.columns());
  std::vector<float> row(columns);
  for (size_t i = 0; i < columns; ++i) row[i] = static_cast<float>(i) - 90;  // exact everywhere
  std::vector<unsigned char> stored(columns * 4), written(columns * 4, 0xA5);
  const auto put = [&](size_t i, float x, std::vector<unsigned char>& to) {
    const auto size = static_cast<size_t>(dtype_size(dtype));
    const uint16_t half = dtype == DType::kBF16 ? float_to_bf16(x) : float_to_fp16(x);
    std::memcpy(&to[i * size], size == 4 ? static_cast<const void*>(&x) : &half, size);
  };
  for (size_t i = 0; i < columns; ++i) put(i, row[i], stored);
  Segment gate(kNaN), up(kNaN);
  HWY_DYNAMIC_DISPATCH(load)(stored.data(), dtype, layout, first, n, gate.v, up.v);
  std::vector<unsigned char> want = written;
  for (size_t j = 0; j < n; ++j) {
    const auto column = first + static_cast<int64_t>(j);
    const auto g = static_cast<size_t>(layout.gate(column));
    const auto u = static_cast<size_t>(layout.up(column));
    ASSERT_EQ(gate.v[j], row[g]) << "column " << column;
    put(g, row[g], want);
    if (!layout.is_gated) continue;
    ASSERT_EQ(up.v[j], row[u]) << "column " << column;
    put(u, row[u], want);
  }
  for (size_t j = n; j < (n + 15) / 16 * 16; ++j) {
    ASSERT_EQ(gate.v[j], 0);
    ASSERT_TRUE(!layout.is_gated || up.v[j] == 0);
  }
  HWY_DYNAMIC_DISPATCH(store)(gate.v, up.v, dtype, layout, first, n, written.data());
  ASSERT_EQ(written, want) << "wrote something else than its columns";
}

TEST(GluRows, LoadAndStoreFindEveryColumnInEveryLayout) {
  for_each_target([&] {
    for (const int64_t f : {96, 90}) {
      for (int64_t block = 0; block <= f; ++block) {
        for (const int32_t order : {MOIRE_GATE_FIRST, MOIRE_UP_FIRST, MOIRE_UNGATED}) {
          const moire_glu_layout layout{block, order};
          if (!is_valid_glu_layout(layout, f)) continue;
          SCOPED_TRACE(testing::Message() << "f " << f << " block " << block << "/" << order);
          for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
            const ResolvedGluLayout resolved = resolve_glu_layout(layout, f);
            ASSERT_NO_FATAL_FAILURE(check_segment(dtype, resolved, 0, kSize));
            ASSERT_NO_FATAL_FAILURE(
                check_segment(dtype, resolved, kSize, static_cast<size_t>(f) - kSize));
            ASSERT_NO_FATAL_FAILURE(check_segment(dtype, resolved, 5, 19));
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace moire::cpu
#endif
