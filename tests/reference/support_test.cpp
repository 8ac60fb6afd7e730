// The test helpers themselves: damage is seen, and comparisons report what differs.
#include <gtest/gtest.h>

#include "tests/support/outputs.h"
#include "tests/support/ragged.h"
#include "tests/support/tensors.h"

namespace moire::test {
namespace {

TEST(TestTensor, StartsAsNaNBetweenGuards) {
  TestTensor t(DType::kBF16, {3, 4}, 2);
  EXPECT_TRUE(std::isnan(t.get(2, 3)));
  t.fill(1.5);
  EXPECT_EQ(t.get(2, 3), 1.5);
  EXPECT_TRUE(t.is_undamaged());
}

TEST(TestTensor, SeesAWriteBeforeBehindAndBetweenItsRows) {
  for (const int64_t element : {-1, 4, 18}) {  // rows of 4 and 2 of padding
    TestTensor t(DType::kFP32, {3, 4}, 2);
    t.fill(0);
    t.as<float>()[element] = 1;
    EXPECT_FALSE(t.is_undamaged()) << element;
  }
}

TEST(TestWorkspace, SeesAWriteBehindIt) {
  const TestWorkspace workspace(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(workspace.get().data) % 256, 0U);
  EXPECT_TRUE(workspace.is_undamaged());
  static_cast<char*>(workspace.get().data)[100] = 0;
  EXPECT_FALSE(workspace.is_undamaged());
}

TEST(Expect, MatchesNamesTheFirstMismatchItsGroupAndTheirNumber) {
  const Batch batch({2, 0, 3});
  TestTensor got(DType::kFP32, {5, 2});
  got.fill(1);
  reference::Matrix want(5, 2);
  for (reference::Number& n : want.values) n = {1, 1e-6};
  EXPECT_TRUE(matches(got, want, batch.groups()));
  got.set(3, 1, 1.1);
  got.set(4, 0, 7);
  const testing::AssertionResult result = matches(got, want, batch.groups());
  EXPECT_FALSE(result);
  EXPECT_EQ(std::string(result.message()),
            "2 elements of 10 differ, first at [3, 1] of group 2: got 1.10000002, want 1 +- "
            "1.05960464e-06");
}

TEST(Expect, MatchesFindsAnElementThatWasNotWritten) {
  TestTensor got(DType::kFP32, {2, 2});
  EXPECT_FALSE(matches(got, reference::Matrix(2, 2)));
}

TEST(Expect, MatchesRefusesAnotherShape) {
  TestTensor got(DType::kFP32, {2, 2});
  got.fill(0);
  EXPECT_TRUE(matches(got, reference::Matrix(2, 2)));
  EXPECT_FALSE(matches(got, reference::Matrix(3, 2)));
  EXPECT_FALSE(matches(got, reference::Matrix(2, 3)));
}

TEST(Expect, SameBitsTellsMinusZeroFromZero) {
  TestTensor a(DType::kFP16, {1, 2}), b(DType::kFP16, {1, 2});
  a.fill(0);
  b.fill(0);
  EXPECT_TRUE(same_bits(a, b));
  b.set(0, 1, -0.0);
  EXPECT_FALSE(same_bits(a, b));
}

TEST(Expect, TailsAreZeroOrUntouched) {
  const Batch batch({1}, 1);
  TestTensor t(DType::kFP32, {2, 3});
  EXPECT_TRUE(tail_is_untouched(t, batch.groups()));
  EXPECT_FALSE(tail_is_zero(t, batch.groups()));
  t.fill(0);
  EXPECT_TRUE(tail_is_zero(t, batch.groups()));
}

TEST(Outputs, OfTwoCallsAreComparedFieldByField) {
  TestTensor act(DType::kBF16, {4, 3}, 2), grad_z(DType::kBF16, {4, 6}),
      grad_probs(DType::kFP32, {4});
  const TestTensor z(DType::kBF16, {4, 6});
  GluBackwardArgs got;
  got.z = z;  // is read: whatever it is
  got.act = act;
  got.grad_z = grad_z;
  got.grad_probs = grad_probs;
  for (TestTensor* t : {&act, &grad_z, &grad_probs}) {
    TestTensor other = *t;
    GluBackwardArgs want = got;
    (t == &act ? want.act : t == &grad_z ? want.grad_z : want.grad_probs) = other;
    EXPECT_TRUE(same_outputs(got, want));
    other.set(0, 2, 1);
    EXPECT_FALSE(same_outputs(got, want));
  }
  GluBackwardArgs without = got;
  without.act = {};
  EXPECT_EQ(std::string(same_outputs(got, without).message()), "not as many outputs");
}

TEST(Outputs, AreAlsoMatricesOfAListAndCopies) {
  TestWeight list(DType::kFP32, 2, 3, 4, MOIRE_OUT_IN, true);
  const TestWeight same = list;
  GroupedGemmWgradArgs wgrad, other;
  wgrad.d = list;
  other.d = same;
  EXPECT_TRUE(same_outputs(wgrad, other));
  list.set(1, 2, 3, 5);
  EXPECT_TRUE(std::string(same_outputs(wgrad, other).message()).ends_with(" of group 1, of d"));
  const TestTensor data(DType::kE4M3, {2, 64}), scales(DType::kE8M0, {2, 2});
  TestTensor written = scales;
  QuantizeArgs quantized, again;
  quantized.rowwise = {data, scales};
  again.rowwise = {data, written};
  EXPECT_TRUE(same_outputs(quantized, again));
  written.as<uint8_t>()[3] = 0;
  EXPECT_FALSE(same_outputs(quantized, again));
}

TEST(Random, RepeatsWithTheSameSeed) {
  Random a, b;
  EXPECT_EQ(a.normal(), b.normal());
}

TEST(RaggedTable, HasEveryKindOfCase) {
  int64_t most_groups = 0, longest_tail = 0;
  for (const RaggedCase& c : ragged_table()) {
    most_groups = std::max(most_groups, static_cast<int64_t>(c.splits.size()));
    longest_tail = std::max(longest_tail, c.tail);
    EXPECT_EQ(Batch(c).capacity(), c.rows() + c.tail);
  }
  EXPECT_EQ(most_groups, 512);
  EXPECT_EQ(longest_tail, 10000);
}

TEST(TestWeight, HoldsTheSameMatrixInEitherLayoutPackedOrListed) {
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    for (const bool listed : {false, true}) {
      TestWeight w(DType::kFP32, 2, 3, 4, layout, listed);
      w.set(1, 2, 3, 5.0);
      EXPECT_EQ(w.get(1, 2, 3), 5.0);
      EXPECT_EQ(reference::read_weight(w, 1).at(2, 3).value, 5.0);
      EXPECT_TRUE(w.is_undamaged());
    }
  }
}

}  // namespace
}  // namespace moire::test
