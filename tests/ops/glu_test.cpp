// glu and glu_backward against the reference, in every layout, dtype and ragged case.
#include "reference/glu.h"

#include <gtest/gtest.h>
#include <moire/glu.h>

#include <limits>

#include "tests/support/outputs.h"
#include "tests/support/ragged.h"

namespace moire::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr DType kDTypes[] = {DType::kFP32, DType::kBF16, DType::kFP16};

std::vector<Activation> activations() {
  return {Activation::swiglu(), Activation::clamped_swiglu(1.5F, 1.702F, 1),
          Activation::geglu_tanh(), Activation::reglu(), Activation::reglu2()};
}

std::vector<GluLayout> layouts(int64_t f) {
  std::vector<GluLayout> out;
  for (const int32_t order : {MOIRE_GATE_FIRST, MOIRE_UP_FIRST}) {
    for (const int64_t block : {0, 1, 2, 8, 16, 32, 3, 5, 96}) {
      if (block == 0 || f % block == 0) out.push_back(GluLayout::interleaved(block, order));
    }
  }
  out.push_back(GluLayout::ungated());
  return out;
}

// All tensors of both directions, random in the rows in use and poisoned elsewhere; z has `halves`
// columns for one of act.
struct Case {
  Case(const Batch& batch, DType dtype, int64_t f, int64_t padding = 0, int64_t halves = 2)
      : z(dtype, {batch.capacity(), halves * f}, padding),
        probs(DType::kFP32, {batch.capacity()}),
        act(dtype, {batch.capacity(), f}, padding),
        grad_act(dtype, {batch.capacity(), f}, padding),
        grad_z(dtype, {batch.capacity(), halves * f}, padding),
        act_again(dtype, {batch.capacity(), f}, padding),
        grad_probs(DType::kFP32, {batch.capacity()}) {
    z.randomize_rows(random, batch.rows(), 2);
    probs.randomize(random);
    grad_act.randomize_rows(random, batch.rows());
    forward.z = z;
    forward.probs = probs;
    forward.act = act;
    forward.groups = batch.groups();
    backward.z = z;
    backward.probs = probs;
    backward.grad_act = grad_act;
    backward.grad_z = grad_z;
    backward.act = act_again;
    backward.grad_probs = grad_probs;
    backward.groups = batch.groups();
  }
  void choose(const Activation& activation, const GluLayout& layout) {
    forward.activation = backward.activation = activation;
    forward.layout = backward.layout = layout;
    for (TestTensor* t : {&act, &grad_z, &act_again, &grad_probs}) t->poison();
  }
  bool is_undamaged() const {
    return z.is_undamaged() && act.is_undamaged() && grad_z.is_undamaged() &&
           act_again.is_undamaged() && grad_probs.is_undamaged();
  }

  Random random;
  TestTensor z, probs, act, grad_act, grad_z, act_again, grad_probs;
  GluArgs forward;
  GluBackwardArgs backward;
};

void expect_right(const Tested& context, Case& c) {
  ASSERT_NO_FATAL_FAILURE(expect_right(context, c.forward));
  ASSERT_NO_FATAL_FAILURE(expect_right(context, c.backward));
  EXPECT_TRUE(same_bits(c.act_again, c.act));
  EXPECT_TRUE(c.is_undamaged());
}

TEST(Glu, MatchesTheReferenceInEveryLayoutActivationAndDType) {
  const Batch batch({5, 0, 2}, 3);
  const Tested context = tested(2);
  for (const int64_t f : {96, 176, 15, 1}) {
    for (const DType dtype : kDTypes) {
      Case gated(batch, dtype, f, 3), ungated(batch, dtype, f, 3, 1);
      for (const Activation& activation : activations()) {
        for (const GluLayout& layout : layouts(f)) {
          Case& c = layout.order == MOIRE_UNGATED ? ungated : gated;
          SCOPED_TRACE(testing::Message()
                       << dtype_name(dtype) << " F " << f << " activation " << activation.kind
                       << " block " << layout.block << " order " << layout.order);
          c.choose(activation, layout);
          ASSERT_NO_FATAL_FAILURE(expect_right(context, c));
        }
      }
    }
  }
}

// On a GPU a block of the gradient takes 4096 columns at a time of 16-bit elements, 2048 of FP32,
// and 512 of elements that do not lie in vectors.
TEST(Glu, TakesRowsOfSeveralParts) {
  struct Shape {
    DType dtype;
    int64_t f, padding;
  };
  const Batch batch({7, 0, 3}, 2);
  for (const Shape& s :
       {Shape{DType::kBF16, 4104, 0}, Shape{DType::kBF16, 4160, 0}, Shape{DType::kFP16, 8200, 0},
        Shape{DType::kFP32, 2056, 0}, Shape{DType::kBF16, 520, 3}, Shape{DType::kFP32, 1030, 3}}) {
    Case c(batch, s.dtype, s.f, s.padding);
    Case ungated(batch, s.dtype, s.f, s.padding, 1);
    ungated.choose(Activation::reglu2(), GluLayout::ungated());
    ASSERT_NO_FATAL_FAILURE(expect_right(tested(), ungated));
    for (const GluLayout& layout : {GluLayout::halves(), GluLayout::interleaved(1, MOIRE_UP_FIRST),
                                    GluLayout::interleaved(s.f % 8 == 0 ? 8 : 2)}) {
      SCOPED_TRACE(testing::Message() << dtype_name(s.dtype) << " F " << s.f << " padding "
                                      << s.padding << " block " << layout.block);
      c.choose(Activation::swiglu(), layout);
      c.backward.act = c.act_again;
      c.backward.grad_probs = c.grad_probs;
      ASSERT_NO_FATAL_FAILURE(expect_right(tested(), c));
      const TestTensor grad_z = c.grad_z, grad_probs = c.grad_probs;
      // Either output may be absent.
      c.choose(Activation::swiglu(), layout);
      c.backward.act = {};
      ASSERT_TRUE(succeeds(glu_backward(tested(), c.backward)));
      EXPECT_TRUE(same_bits(c.grad_z, grad_z));
      EXPECT_TRUE(same_bits(c.grad_probs, grad_probs));
      c.choose(Activation::swiglu(), layout);
      c.backward.grad_probs = {};
      ASSERT_TRUE(succeeds(glu_backward(tested(), c.backward)));
      EXPECT_TRUE(same_bits(c.grad_z, grad_z));
    }
  }
}

class GluRagged : public testing::TestWithParam<RaggedCase> {};

TEST_P(GluRagged, MatchesTheReference) {
  const Batch batch(GetParam());
  Case c(batch, DType::kBF16, 48);
  c.choose(Activation::swiglu(), GluLayout::interleaved(16));
  expect_right(tested(), c);
}

TEST_P(GluRagged, LeavesAnUntouchedTailAlone) {
  const Batch batch(GetParam());
  Case c(batch, DType::kFP16, 8);
  c.choose(Activation::swiglu(), GluLayout::halves());
  c.forward.tail = c.backward.tail = MOIRE_TAIL_UNTOUCHED;
  ASSERT_TRUE(succeeds(glu(tested(), c.forward)));
  ASSERT_TRUE(succeeds(glu_backward(tested(), c.backward)));
  for (const TestTensor* t : {&c.act, &c.grad_z, &c.act_again, &c.grad_probs}) {
    EXPECT_TRUE(tail_is_untouched(*t, batch.groups()));
  }
}

INSTANTIATE_TEST_SUITE_P(Table, GluRagged, testing::ValuesIn(ragged_table()), case_name);

TEST(Glu, WithoutGroupsUsesEveryRowAndWithoutProbsMultipliesByOne) {
  const Batch batch({70});
  Case with(batch, DType::kBF16, 176), without(batch, DType::kBF16, 176);
  without.z = with.z;
  without.grad_act = with.grad_act;
  with.probs.fill(1);
  with.choose(Activation::geglu_tanh(), GluLayout::interleaved(1));
  without.choose(Activation::geglu_tanh(), GluLayout::interleaved(1));
  without.forward.groups = without.backward.groups = {};
  without.forward.probs = without.backward.probs = {};
  without.forward.z = without.backward.z = without.z;
  without.backward.grad_act = without.grad_act;
  expect_right(tested(), with);
  ASSERT_TRUE(succeeds(glu(tested(), without.forward)));
  ASSERT_TRUE(succeeds(glu_backward(tested(), without.backward)));
  EXPECT_TRUE(same_bits(with.act, without.act));
  EXPECT_TRUE(same_bits(with.grad_z, without.grad_z));
  EXPECT_TRUE(same_bits(with.grad_probs, without.grad_probs));
}

TEST(Glu, HasTheSameBitsOnAnyNumberOfThreads) {
  const Batch batch({300, 0, 211}, 40);
  for (const DType dtype : kDTypes) {
    Case c(batch, dtype, 200);
    c.choose(Activation::swiglu(), GluLayout::interleaved(8));
    expect_right(cpu(1), c);
    expect_same_on_any_threads(c.forward);
    expect_same_on_any_threads(c.backward);
  }
}

// A test that could not fail would be worthless: what a wrong layout gives must not pass.
TEST(Glu, AWrongLayoutIsDetected) {
  const Batch batch({9});
  Case c(batch, DType::kBF16, 64);
  c.choose(Activation::swiglu(), GluLayout::interleaved(32));
  expect_right(tested(), c);
  for (const GluLayout& wrong :
       {GluLayout::halves(), GluLayout::interleaved(1), GluLayout::interleaved(16),
        GluLayout::interleaved(32, MOIRE_UP_FIRST)}) {
    GluArgs forward = c.forward;
    GluBackwardArgs backward = c.backward;
    forward.layout = backward.layout = wrong;
    EXPECT_FALSE(matches(c.act, reference::glu(forward), batch.groups()));
    EXPECT_FALSE(matches(c.grad_z, reference::glu_backward(backward).grad_z, batch.groups()));
    EXPECT_FALSE(
        matches(c.grad_probs, reference::glu_backward(backward).grad_probs, batch.groups()));
  }
}

TEST(Glu, NaNAndInfinityStayInTheirRowAndZeroProbKeepsItsGradient) {
  const Batch batch({4});
  Case clean(batch, DType::kBF16, 80);
  clean.probs.set(0, 2, 0);
  clean.choose(Activation::clamped_swiglu(), GluLayout::halves());
  expect_right(tested(), clean);
  EXPECT_NE(clean.grad_probs.get(0, 2), 0);
  Case dirty(batch, DType::kBF16, 80);
  dirty.z = clean.z;
  dirty.probs = clean.probs;
  dirty.grad_act = clean.grad_act;
  dirty.forward.z = dirty.backward.z = dirty.z;
  dirty.forward.probs = dirty.backward.probs = dirty.probs;
  dirty.backward.grad_act = dirty.grad_act;
  dirty.z.set(1, 7, kNaN);
  dirty.grad_act.set(1, 9, kInfinity);
  dirty.choose(Activation::clamped_swiglu(), GluLayout::halves());
  ASSERT_TRUE(succeeds(glu(tested(), dirty.forward)));
  ASSERT_TRUE(succeeds(glu_backward(tested(), dirty.backward)));
  EXPECT_TRUE(std::isnan(dirty.act.get(1, 7)));
  EXPECT_TRUE(std::isnan(dirty.grad_z.get(1, 7)));
  EXPECT_TRUE(std::isnan(dirty.grad_probs.get(0, 1)));
  for (const int64_t row : {0, 2, 3}) {
    for (int64_t j = 0; j < 160; ++j) ASSERT_EQ(dirty.grad_z.get(row, j), clean.grad_z.get(row, j));
    for (int64_t j = 0; j < 80; ++j) ASSERT_EQ(dirty.act.get(row, j), clean.act.get(row, j));
    EXPECT_EQ(dirty.grad_probs.get(0, row), clean.grad_probs.get(0, row));
  }
}

TEST(Glu, TheClampedGradientPassesAtTheLimitAndNotBeyond) {
  const Batch batch({1});
  Case c(batch, DType::kFP32, 4);
  const double gates[] = {7, 7.5, -9, 1}, ups[] = {7, 2, -7, -7.5};
  for (int64_t j = 0; j < 4; ++j) {
    c.z.set(0, j, gates[j]);
    c.z.set(0, 4 + j, ups[j]);
    c.grad_act.set(0, j, 1);
  }
  c.choose(Activation::clamped_swiglu(), GluLayout::halves());
  expect_right(tested(), c);
  EXPECT_NE(c.grad_z.get(0, 0), 0);
  EXPECT_EQ(c.grad_z.get(0, 1), 0);
  EXPECT_NE(c.grad_z.get(0, 2), 0);
  EXPECT_NE(c.grad_z.get(0, 4), 0);
  EXPECT_NE(c.grad_z.get(0, 6), 0);
  EXPECT_EQ(c.grad_z.get(0, 7), 0);
}

// Central differences of the reference forward in double, at points the gradient is smooth at.
TEST(Glu, GradientsAreCentralDifferencesOfTheForward) {
  const Batch batch({3});
  const int64_t f = 24;
  for (const Activation& activation : activations()) {
    Case c(batch, DType::kFP32, f);
    const GluLayout layout = GluLayout::interleaved(8, MOIRE_UP_FIRST);
    c.choose(activation, layout);
    expect_right(tested(), c);
    constexpr double kStep = 1e-6, kDifferenceError = 1e-6;  // of second differences and rounding
    for (int64_t row = 0; row < 3; ++row) {
      const double prob = c.probs.get(0, row);
      for (int64_t j = 0; j < f; ++j) {
        const auto at = reference::glu_columns(layout, f, j);
        const double gate = c.z.get(row, at.gate), up = c.z.get(row, at.up);
        const auto value = [&](double a, double b) {
          return reference::glu(activation, {a}, {b}, prob).value * c.grad_act.get(row, j);
        };
        const double limit = activation.limit;  // of the gate: where it has none, 0 of a ReLU
        const bool near_kink =
            std::abs(gate - limit) < 1e-4 || std::abs(std::abs(up) - limit) < 1e-4;
        if (near_kink) continue;
        const double by_gate = (value(gate + kStep, up) - value(gate - kStep, up)) / (2 * kStep);
        const double by_up = (value(gate, up + kStep) - value(gate, up - kStep)) / (2 * kStep);
        const double bound = kDifferenceError * (1 + std::abs(by_gate) + std::abs(by_up));
        EXPECT_NEAR(c.grad_z.get(row, at.gate), by_gate, bound);
        EXPECT_NEAR(c.grad_z.get(row, at.up), by_up, bound);
      }
    }
  }
}

TEST(Glu, TakesEmptyTensors) {
  const Batch none(std::vector<int64_t>{});
  Case no_rows(none, DType::kBF16, 8);
  EXPECT_TRUE(succeeds(glu(tested(), no_rows.forward)));
  EXPECT_TRUE(succeeds(glu_backward(tested(), no_rows.backward)));
  const Batch batch({3}, 1);
  Case no_columns(batch, DType::kBF16, 0);
  EXPECT_TRUE(succeeds(glu(tested(), no_columns.forward)));
  ASSERT_TRUE(succeeds(glu_backward(tested(), no_columns.backward)));
  for (int64_t row = 0; row < 4; ++row) EXPECT_EQ(no_columns.grad_probs.get(0, row), 0);
}

}  // namespace
}  // namespace moire::test
