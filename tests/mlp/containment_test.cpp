// Values that are not finite: what is wrong in one group is in no other, in every 8-bit recipe
// (invariance_test.cpp has the others).
#include <cmath>
#include <limits>

#include "tests/mlp/mlp_checks.h"
#include "tests/mlp/recipe_cases.h"

namespace moire::test {
namespace {

// NaN and infinity in all that belongs to one group: x, weights, b1, b2, probs, grad_y.
MlpProblem spoilt_copy(const MlpProblem& clean, int64_t group) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  MlpProblem p = clean;
  for (int64_t i = p.batch.groups().offsets[group]; i < p.batch.groups().offsets[group + 1]; ++i) {
    const double bad = i % 3 == 0 ? kNan : i % 3 == 1 ? kInfinity : -kInfinity;
    p.x.set(i, i % p.options.hidden, bad);
    p.grad_y.set(i, (i + 1) % p.options.hidden, bad);
    if (i % 5 == 0) p.probs.set(0, i, kNan);
  }
  p.w1.set(group, 3, 1, kNan);
  p.w1.set(group, 5, 2, kInfinity);
  p.w2.set(group, 0, 1, -kInfinity);
  p.w2.set(group, 2, 0, kNan);
  p.b1.set(group, 1, kInfinity);
  p.b2.set(group, 1, kNan);
  return p;
}

void expect_same_outside(const MlpProblem& clean, const MlpProblem& spoilt, int64_t group) {
  const Groups& groups = clean.batch.groups();
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    if (g == group) continue;
    SCOPED_TRACE(testing::Message() << "group " << g);
    const auto same_rows = [&](const TestTensor& a, const TestTensor& b) {
      for (int64_t i = groups.offsets[g]; i < groups.offsets[g + 1]; ++i) {
        for (int64_t j = 0; j < a.view().columns(); ++j) {
          if (a.get(i, j) != b.get(i, j)) return testing::AssertionFailure() << i << ", " << j;
        }
      }
      return testing::AssertionSuccess();
    };
    const auto matrix = [g](const TestWeight& w) { return Weight(w.view()).matrix(g); };
    EXPECT_TRUE(same_rows(clean.y, spoilt.y)) << "y";
    EXPECT_TRUE(same_rows(clean.z, spoilt.z)) << "z";
    EXPECT_TRUE(same_rows(clean.grad_x, spoilt.grad_x)) << "grad_x";
    for (int64_t i = groups.offsets[g]; i < groups.offsets[g + 1]; ++i) {
      EXPECT_EQ(clean.grad_probs.get(0, i), spoilt.grad_probs.get(0, i)) << i;
    }
    EXPECT_TRUE(same_bits(matrix(clean.grad_w1), matrix(spoilt.grad_w1))) << "grad_w1";
    EXPECT_TRUE(same_bits(matrix(clean.grad_w2), matrix(spoilt.grad_w2))) << "grad_w2";
    for (int64_t j = 0; j < clean.grad_b1.view().columns(); ++j) {
      EXPECT_EQ(clean.grad_b1.get(g, j), spoilt.grad_b1.get(g, j)) << "grad_b1";
    }
    for (int64_t j = 0; j < clean.grad_b2.view().columns(); ++j) {
      EXPECT_EQ(clean.grad_b2.get(g, j), spoilt.grad_b2.get(g, j)) << "grad_b2";
    }
  }
}

void expect_contained(const RecipeCase& c, const MlpProblem& clean, int64_t group) {
  const MlpProblem spoilt = spoilt_copy(clean, group);
  for (const MlpProblem* p : {&clean, &spoilt}) {
    const Tested context = Tested::finding(tested());
    ASSERT_TRUE(succeeds(run(context, c.in(p->forward()))));
    ASSERT_TRUE(succeeds(run(context, c.in(p->backward()))));
  }
  expect_same_outside(clean, spoilt, group);
  const int64_t first = clean.batch.groups().offsets[group];
  // The NaN of a weight is in all of the group's rows, that of x in its row of gradients.
  EXPECT_TRUE(std::isnan(spoilt.y.get(first + 1, 2)));
  EXPECT_TRUE(std::isnan(spoilt.grad_x.get(first + 1, 1)));
  EXPECT_TRUE(std::isnan(spoilt.grad_w1.get(group, 0, 0)));
}

// Groups that share columns' blocks of 32 and 128 rows in memory: what is wrong in one is its own.
TEST(Recipe, NonFiniteValuesStayInTheirGroup) {
  Random random;
  for (const RecipeCase& c : recipes()) {
    for (const int64_t width : {24, 64}) {  // a block of act that is short, and two that are whole
      for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
        SCOPED_TRACE(testing::Message() << testing::PrintToString(c) << ", width " << width);
        MlpOptions options;
        options.ragged = {"Uneven", {40, 33, 0, 150, 1}, 3};
        options.hidden = 40;
        options.width = width;
        options.dtype = DType::kBF16;
        options.w1_layout = options.w2_layout = layout;
        const MlpProblem clean(options, random);
        for (const int64_t group : {1, 3}) expect_contained(c, clean, group);
      }
    }
  }
}

}  // namespace
}  // namespace moire::test
