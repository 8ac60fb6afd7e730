// The check bites: a result that is wrong anywhere is found, and where is said.
#include <gtest/gtest.h>
#include <moire/context.h>

#include <cstring>

#include "case_runner.h"
#include "cases.h"
#include "comparison.h"
#include "operands.h"
#include "random_problem.h"
#include "reference/tensor.h"

namespace moire::tool {
namespace {

using reference::Matrix;
constexpr auto kBatch = Comparison::Rows::kBatch;

Problem problem_of(const std::string& line) {
  const Result<Problem> parsed = parse_problem(line);
  EXPECT_TRUE(parsed.ok()) << parsed.status().message();
  return parsed.value();
}

// Two groups of 2 and 3 rows, and two rows of tail.
const char* const kLine = "groups=2 hidden=4 ffn=2 splits=2,3 tail=2 dtype=fp32";

// A right answer, and the tensor that holds it.
struct Answer {
  explicit Answer(Operands& operands)
      : got(operands.output("y", DType::kFP32, {7, 4})), want(5, 4) {
    for (int64_t i = 0; i < 7; ++i) {
      for (int64_t j = 0; j < 4; ++j) {
        const double value = i < 5 ? static_cast<double>(10 * i + j) : 0;
        reference::write_element(got, i, j, value);
        if (i < 5) want.at(i, j) = {value, 0};
      }
    }
  }
  TensorView got;
  Matrix want;
};

TEST(Comparison, PassesWhatIsRight) {
  Operands operands(problem_of(kLine), Operands::Content::kHostile);
  const Answer answer(operands);
  Comparison c(operands);
  c.add("y", answer.got, answer.want, kBatch, Comparison::TailRule::kZero);
  EXPECT_TRUE(c.passed());
  EXPECT_EQ(c.outputs()[0].elements, 20);
  EXPECT_EQ(c.outputs()[0].max_error, 0);
}

TEST(Comparison, NamesCoordinateGroupGotAndWant) {
  Operands operands(problem_of(kLine), Operands::Content::kHostile);
  const Answer answer(operands);
  reference::write_element(answer.got, 3, 1, 32);
  reference::write_element(answer.got, 4, 2, 5);
  Comparison c(operands);
  c.add("y", answer.got, answer.want, kBatch, Comparison::TailRule::kZero);
  ASSERT_FALSE(c.passed());
  EXPECT_EQ(c.outputs()[0].mismatches, 2);
  EXPECT_EQ(c.outputs()[0].first_mismatch.find("first at [3, 1] of group 1: got 32, want 31 +- "),
            0U)
      << c.outputs()[0].first_mismatch;
}

TEST(Comparison, TakesAnOutputThatIsRightByAnotherJudge) {
  Operands operands(problem_of(kLine), Operands::Content::kHostile);
  const Answer answer(operands);
  Matrix other = answer.want;
  other.at(3, 1).value = 99;
  const auto judge = [&](const Matrix& y, const Matrix& z) {
    return [&answer, y, z](Comparison& c) {
      c.add("y", answer.got, y, kBatch);
      c.add("z", answer.got, z, kBatch);
    };
  };
  Comparison either(operands), neither(operands);
  judge(other, answer.want)(either);
  either.or_else(judge(answer.want, other));  // each output by the one or the other
  EXPECT_TRUE(either.passed());
  judge(other, answer.want)(neither);
  neither.or_else(judge(other, answer.want));
  EXPECT_FALSE(neither.passed());
}

TEST(Comparison, FindsAnElementThatWasNeverWritten) {
  Operands operands(problem_of(kLine), Operands::Content::kHostile);
  const TensorView untouched = operands.output("y", DType::kBF16, {7, 4});
  Comparison c(operands);
  c.add("y", untouched, Matrix(5, 4), kBatch, Comparison::TailRule::kUntouched);
  EXPECT_EQ(c.outputs()[0].mismatches, 20);
}

TEST(Comparison, HoldsTheTailToItsRule) {
  Operands operands(problem_of(kLine), Operands::Content::kHostile);
  const Answer answer(operands);
  Comparison zero(operands), untouched(operands);
  untouched.add("y", answer.got, answer.want, kBatch, Comparison::TailRule::kUntouched);
  EXPECT_EQ(untouched.outputs()[0].mismatches, 8);
  reference::write_element(answer.got, 6, 3, 1e-30);
  zero.add("y", answer.got, answer.want, kBatch, Comparison::TailRule::kZero);
  ASSERT_EQ(zero.outputs()[0].mismatches, 1);
  EXPECT_EQ(zero.outputs()[0].first_mismatch.find("first in the tail, at [6, 3]: got 1"), 0U);
}

TEST(Operands, NoticeAWriteOutsideOfATensor) {
  Operands operands(problem_of(kLine), Operands::Content::kHostile);
  const TensorView y = operands.output("y", DType::kFP32, {7, 4});
  EXPECT_EQ(operands.first_broken_guard(), "");
  static_cast<float*>(y.data)[28] = 0;
  EXPECT_EQ(operands.first_broken_guard(), "y");
}

TEST(Operands, AreTheSameForTheSameSeedAndDifferentForAnother) {
  const Problem p = problem_of(kLine);
  Problem other = p;
  other.seed = 2;
  Operands a(p, Operands::Content::kNormal), b(p, Operands::Content::kNormal);
  Operands c(other, Operands::Content::kNormal);
  const auto x_of = [](Operands& operands) {
    const TensorView x = operands.take("x", DType::kFP32, {5, 4});
    operands.fill_normal(x, "x", 1);
    return x;
  };
  const TensorView xa = x_of(a), xb = x_of(b), xc = x_of(c);
  EXPECT_EQ(std::memcmp(xa.data, xb.data, 80), 0);
  EXPECT_NE(std::memcmp(xa.data, xc.data, 80), 0);
}

// Every op's case on a context that runs nothing: outputs keep their poison, which must fail.
TEST(Check, FailsWhenNothingRan) {
  const Result<Context> context = Context::create();
  ASSERT_TRUE(context.ok()) << context.status().message();
  const Context explaining = context.value().explaining();
  for (const Op& op : all_ops()) {
    Problem p = problem_of("groups=3 hidden=16 ffn=8 rows=20 topk=2 bias=yes splits=ragged");
    p.op = &op;
    const Verdict verdict = judge(explaining, p);
    EXPECT_EQ(verdict.kind, Verdict::Kind::kFailed) << op.name;
  }
}

// What bench does before it times: rows of the real operands.
TEST(Check, JudgesSingleRowsOfEveryProduct) {
  const Result<Context> context = Context::create();
  ASSERT_TRUE(context.ok()) << context.status().message();
  for (const char* options : {"", " gather=yes weights=in_out", " storage=list dtype=bf16"}) {
    for (const Op& op : all_ops()) {
      Problem p = problem_of(std::string("groups=3 hidden=48 ffn=40 rows=30 topk=2 bias=yes "
                                         "splits=4,0,26") +
                             options);
      p.op = &op;
      Operands operands(p, Operands::Content::kNormal);
      const Case what = make_case(operands);
      int64_t num_judged = 0;
      for (const Call& call : what.calls) {
        size_t bytes = 0;
        if (call.workspace != nullptr) {
          ASSERT_TRUE(call.workspace(context.value(), &bytes).ok()) << op.name;
        }
        if (call.expect_row != nullptr) ++num_judged;
        if (num_judged > 0) {
          EXPECT_NE(judge_rows(Device::kCpu, operands, {{call}}), "")
              << op.name << " before it ran";
        }
        ASSERT_TRUE(call.run(context.value(), operands.workspace(bytes)).ok()) << op.name;
        EXPECT_EQ(judge_rows(Device::kCpu, operands, {{call}}), "") << op.name << options;
      }
    }
  }
}

TEST(Check, PassesRandomProblemsOfEveryOp) {
  const Result<Context> context = Context::create();
  ASSERT_TRUE(context.ok()) << context.status().message();
  constexpr uint64_t kSeed = 77;
  for (const Op& op : all_ops()) {
    for (int64_t i = 0; i < 8; ++i) {
      const Problem p = random_problem(kSeed, i, {{"op", {std::string(op.name)}}});
      const Verdict verdict = judge(context.value(), p);
      EXPECT_EQ(verdict.kind, Verdict::Kind::kPassed) << to_line(p) << "\n" << verdict.reason;
    }
  }
}

}  // namespace
}  // namespace moire::tool
