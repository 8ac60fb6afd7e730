// The comparison bites: a result that is wrong anywhere is found, and where is said.
#include "reference/comparison.h"

#include <gtest/gtest.h>

#include "reference/outputs.h"
#include "tests/support/ragged.h"
#include "tests/support/tensors.h"

namespace moire::reference {
namespace {

// Two groups of 2 and 3 rows, and two rows of tail: a right answer, and the tensor that holds it.
struct Answer {
  Answer() {
    for (int64_t i = 0; i < 7; ++i) {
      for (int64_t j = 0; j < 4; ++j) {
        const double value = i < 5 ? static_cast<double>(10 * i + j) : 0;
        got.set(i, j, value);
        if (i < 5) want.at(i, j) = {value, 0};
      }
    }
  }
  OutputErrors compared(TailRule tail) const {
    return compare(got.view(), want, {tail, batch.groups()});
  }

  test::Batch batch{{2, 3}, 2};
  test::TestTensor got{DType::kFP32, {7, 4}};
  Matrix want{5, 4};
};

TEST(Comparison, PassesWhatIsRight) {
  const OutputErrors errors = Answer().compared(TailRule::kZero);
  EXPECT_EQ(errors.mismatches, 0);
  EXPECT_EQ(errors.elements, 20);
  EXPECT_EQ(errors.max_error, 0);
}

TEST(Comparison, NamesCoordinateGroupGotAndWant) {
  Answer answer;
  answer.got.set(3, 1, 32);
  answer.got.set(4, 2, 5);
  const OutputErrors errors = answer.compared(TailRule::kZero);
  EXPECT_EQ(errors.mismatches, 2);
  EXPECT_TRUE(errors.first_mismatch.starts_with("first at [3, 1] of group 1: got 32, want 31 +- "))
      << errors.first_mismatch;
}

TEST(Comparison, FindsAnElementThatWasNeverWritten) {
  const test::TestTensor untouched(DType::kBF16, {7, 4});
  const OutputErrors errors = compare(untouched.view(), Matrix(5, 4), {TailRule::kUntouched});
  EXPECT_EQ(errors.mismatches, 20);
}

TEST(Comparison, HoldsTheTailToItsRule) {
  Answer answer;
  EXPECT_EQ(answer.compared(TailRule::kUntouched).mismatches, 8);
  answer.got.set(6, 3, 1e-30);
  const OutputErrors errors = answer.compared(TailRule::kZero);
  ASSERT_EQ(errors.mismatches, 1);
  EXPECT_TRUE(errors.first_mismatch.starts_with("first in the tail, at [6, 3]: got byte "))
      << errors.first_mismatch;
  EXPECT_EQ(answer.compared(TailRule::kAnything).mismatches, 0);
}

TEST(Comparison, CountsTheMismatchesOfEveryGroupOfAWeight) {
  test::TestTensor w(DType::kFP32, {2, 1, 2});
  w.fill(3);
  Weights want(2, Matrix(1, 2));
  const OutputErrors errors = compare(Weight(w.view()), want);
  EXPECT_EQ(errors.mismatches, 4);
  EXPECT_TRUE(errors.first_mismatch.starts_with("first at [0, 0] of group 0: got 3, want 0"));
  want.pop_back();
  EXPECT_EQ(compare(Weight(w.view()), want).first_mismatch, "got 2 groups, want 1");
}

TEST(Comparison, ReadsIndicesOfRowsThatLieApart) {
  test::TestTensor apart(DType::kInt32, {2, 2}, 3);
  for (int64_t i = 0; i < 4; ++i) {
    apart.as<int32_t>()[i / 2 * apart.view().stride() + i % 2] = static_cast<int32_t>(i);
  }
  EXPECT_EQ(compare(apart.view(), std::vector<int64_t>{0, 1, 2, 3}).mismatches, 0);
  EXPECT_EQ(compare(apart.view(), std::vector<int64_t>{0, 1, 3, 2}).mismatches, 2);
}

TEST(Comparison, FindsBytesAndIndicesThatDiffer) {
  test::TestTensor codes(DType::kE4M3, {3, 2});
  ByteRows bytes(3, 2);
  bytes.is_owned = {true, false, true};
  for (const int64_t row : {0, 2}) bytes.at(row, 0) = bytes.at(row, 1) = 0xFF;
  EXPECT_EQ(compare(codes.view(), bytes, {TailRule::kUntouched}).mismatches, 0);
  EXPECT_EQ(compare(codes.view(), bytes, {TailRule::kZero}).mismatches, 2);
  EXPECT_EQ(compare(codes.view(), bytes, {TailRule::kAnything}).elements, 4);
  bytes.at(2, 1) = 3;
  EXPECT_EQ(compare(codes.view(), bytes, {}).first_mismatch,
            "first at [2, 1]: got byte 255, want 3");
  const test::TestTensor indices = test::index_tensor(DType::kInt32, {4, -1, 7});
  EXPECT_EQ(compare(indices.view(), std::vector<int64_t>{4, -1, 6}).first_mismatch,
            "first at [2]: got 7, want 6");
  EXPECT_EQ(compare(indices.view(), std::vector<int64_t>{4, -1}).mismatches, 1);
}

// The reference's results of an op, less one that the op has.
struct RowsAlone {
  Matrix rows;
};

TEST(Comparison, FindsAnOutputThatTheReferenceDoesNotKnow) {
  const Answer answer;
  const test::TestTensor probs(DType::kFP32, {7});
  PermuteArgs args;
  args.rows = answer.got, args.probs = probs;
  args.groups = answer.batch.groups();
  const std::vector<OutputErrors> outputs = compare_outputs(args, RowsAlone{answer.want});
  ASSERT_EQ(outputs.size(), 2);
  EXPECT_EQ(outputs[0].mismatches, 0) << outputs[0].first_mismatch;
  EXPECT_EQ(outputs[1].name, "probs");
  EXPECT_EQ(outputs[1].first_mismatch, "the reference has no result of this name");
  EXPECT_FALSE(all_passed(outputs));
}

}  // namespace
}  // namespace moire::reference
