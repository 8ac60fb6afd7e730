// The check bites: a result that is wrong anywhere is found, and where is said.
#include <gtest/gtest.h>
#include <moire/context.h>
#include <moire/glu.h>

#include <cmath>
#include <cstring>

#include "case_runner.h"
#include "cases.h"
#include "operands.h"
#include "problem_source.h"
#include "reference/outputs.h"

namespace moire::tool {
namespace {

// Two groups of 2 and 3 rows, and two rows of tail.
const char* const kLine = "groups=2 hidden=4 ffn=2 splits=2,3 tail=2 dtype=fp32";

TEST(Outputs, MayBeRightByAnotherJudge) {
  const auto outputs = [](int64_t y, int64_t z) {
    std::vector<OutputErrors> out(2);
    out[0].mismatches = y;
    out[1].mismatches = z;
    return out;
  };
  std::vector<OutputErrors> either = outputs(1, 0), neither = outputs(1, 0);
  reference::or_else(either, [&] { return outputs(0, 1); });  // each output by the one or the other
  EXPECT_TRUE(reference::all_passed(either));
  reference::or_else(neither, [&] { return outputs(1, 0); });
  EXPECT_FALSE(reference::all_passed(neither));
}

TEST(Operands, AreBetweenNaNAndNoticeAWriteOutsideOfATensor) {
  Operands operands(parse_problem(kLine), Operands::Content::kHostile);
  const TensorView y = operands.output("y", DType::kFP32, {7, 4});
  EXPECT_EQ(operands.first_broken_guard(), "");
  for (const int64_t i : {-1, 28}) EXPECT_TRUE(std::isnan(static_cast<float*>(y.data)[i])) << i;
  static_cast<float*>(y.data)[28] = 0;
  EXPECT_EQ(operands.first_broken_guard(), "y");
}

TEST(Operands, AreTheSameForTheSameSeedAndDifferentForAnother) {
  const Problem p = parse_problem(kLine);
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
    Problem p = parse_problem("groups=3 hidden=16 ffn=8 rows=20 topk=2 bias=yes splits=ragged");
    p.op = &op;
    const Verdict verdict = judge(explaining, p);
    EXPECT_EQ(verdict.kind, Verdict::Kind::kFailed) << op.name;
  }
}

// Codes, and their scales, byte for byte: one that is wrong is found.
TEST(Check, JudgesConvertedCodesAndTheirScales) {
  const Result<Context> context = Context::create();
  ASSERT_TRUE(context.ok()) << context.status().message();
  for (const char* options : {"dtype=mxfp8 layout=blocks:2", "dtype=fp8_block layout=blocks:128",
                              "dtype=mxfp8 layout=interleaved weights=in_out seed=2"}) {
    Case what(
        parse_problem(std::string("op=convert_glu groups=2 hidden=40 ffn=256 rows=0 ") + options),
        Operands::Content::kHostile);
    ASSERT_EQ(what.calls.size(), 2U);
    for (const Call& call : what.calls) {
      const Call::Judge errors = call.expect(Device::kCpu);
      EXPECT_GT(errors()[0].mismatches, 0) << options << " before it ran";
      ASSERT_TRUE(call.run(context.value(), {}).ok()) << options;
      EXPECT_TRUE(reference::all_passed(errors())) << options;
      const TensorView target = std::any_cast<ConvertGluArgs>(call.args).target;
      EXPECT_EQ(errors()[0].elements, target.num_bytes());
      static_cast<uint8_t*>(target.data)[target.num_bytes() - 1] ^= 1;
      EXPECT_EQ(errors()[0].mismatches, 1) << options;
    }
  }
}

// What bench does before it times: rows of the real operands.
TEST(Check, JudgesSingleRowsOfEveryProduct) {
  const Result<Context> context = Context::create();
  ASSERT_TRUE(context.ok()) << context.status().message();
  for (const char* options : {"", " gather=yes weights=in_out", " storage=list dtype=bf16"}) {
    for (const Op& op : all_ops()) {
      Problem p = parse_problem(std::string("groups=3 hidden=48 ffn=40 rows=30 topk=2 bias=yes "
                                            "splits=4,0,26") +
                                options);
      p.op = &op;
      Case what(p, Operands::Content::kNormal);
      Operands& operands = what.operands;
      int64_t num_judged = 0;
      for (const Call& call : what.calls) {
        size_t bytes = 0;
        ASSERT_TRUE(call.workspace(context.value(), &bytes).ok()) << op.name;
        if (call.expect_row != nullptr) ++num_judged;
        if (num_judged > 0) {
          EXPECT_THROW(require_right_rows(Device::kCpu, operands, {{call}}), std::runtime_error)
              << op.name << " before it ran";
        }
        ASSERT_TRUE(call.run(context.value(), operands.workspace(bytes)).ok()) << op.name;
        EXPECT_NO_THROW(require_right_rows(Device::kCpu, operands, {{call}})) << op.name << options;
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
