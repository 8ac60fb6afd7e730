// What a context's check() says after infinities and NaN were quantised: the first of them, once.
#include <gtest/gtest.h>
#include <moire/quantize.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/ops/quantize_support.h"
#include "tests/support/expect.h"
#include "tests/support/grouped_gemm_cases.h"
#include "tests/support/ragged.h"

namespace moire::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kRows = 150, kColumns = 96;

// One group of rows in both directions.
struct Call {
  Call(DType dtype, int32_t scaling)
      : source(dtype, {kRows, kColumns}),
        codes{TestTensor(DType::kE4M3, {kRows, kColumns}),
              TestTensor(DType::kE4M3, {kRows, kColumns})},
        scales{scales_of(scaling, MOIRE_ROWWISE), scales_of(scaling, MOIRE_COLUMNWISE)} {
    source.randomize(random);
    args.source = source;
    args.scaling = scaling;
    args.rowwise = {codes[0], scales[0]};
    args.columnwise = {codes[1], scales[1]};
  }
  static TestTensor scales_of(int32_t scaling, int32_t direction) {
    const int64_t block = scaling == MOIRE_SCALING_MXFP8 ? 32 : 128;
    const DType dtype = scaling == MOIRE_SCALING_MXFP8 ? DType::kE8M0 : DType::kFP32;
    return direction == MOIRE_ROWWISE ? TestTensor(dtype, {kRows, (kColumns + block - 1) / block})
                                      : TestTensor(dtype, {kRows / block + 1, kColumns});
  }

  Random random;
  TestTensor source;
  TestTensor codes[2], scales[2];
  QuantizeArgs args;
};

TEST(QuantizeFindings, FiniteNumbersAreNone) {
  const Tested context = Tested::finding(tested());
  for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    Call call(dtype, MOIRE_SCALING_MXFP8);
    call.source.set(3, 3, 60000);  // finite in each type
    ASSERT_TRUE(succeeds(quantize(context, call.args)));
    EXPECT_TRUE(succeeds(context.check()));
  }
}

TEST(QuantizeFindings, NameTheElementOnce) {
  const Tested context = Tested::finding(tested());
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
      for (const double value : {kInfinity, -kInfinity, kNaN}) {
        for (const bool columns_only : {false, true}) {
          Call call(dtype, scaling);
          if (columns_only) call.args.rowwise = {};
          call.source.set(101, 37, value);
          call.source.set(140, 2, kNaN);
          ASSERT_TRUE(succeeds(quantize(context, call.args)));
          EXPECT_TRUE(fails(context.check(), Code::kInvalidArgument,
                            "quantize: source[101, 37] is infinite or NaN"));
          EXPECT_TRUE(succeeds(context.check())) << "it was said once";
        }
      }
    }
  }
}

TEST(QuantizeFindings, RowsPastTheGroupsAreNone) {
  const Tested context = Tested::finding(tested());
  Call call(DType::kBF16, MOIRE_SCALING_MXFP8);
  const Batch batch({100}, kRows - 100);
  call.source.set(120, 0, kInfinity);
  call.args.groups = batch.groups();
  ASSERT_TRUE(succeeds(quantize(context, call.args)));
  EXPECT_TRUE(succeeds(context.check()));
}

TEST(QuantizeFindings, OfGatheredRowsNameTheRowOfTheSource) {
  const Tested context = Tested::finding(tested());
  Call call(DType::kFP32, MOIRE_SCALING_MXFP8);
  std::vector<int64_t> order(kRows);
  for (int64_t i = 0; i < kRows; ++i) order[static_cast<size_t>(i)] = kRows - 1 - i;
  const TestTensor row_idx = index_tensor(DType::kInt64, order);
  call.args.row_idx = row_idx;
  call.source.set(101, 37, kNaN);
  call.source.set(7, 2, kNaN);  // comes later
  ASSERT_TRUE(succeeds(quantize(context, call.args)));
  EXPECT_TRUE(fails(context.check(), Code::kInvalidArgument, "quantize: source[101, 37] is"));
}

TEST(QuantizeFindings, OfWeightsNameGroupAndElement) {
  const Tested context = Tested::finding(tested());
  Random random;
  for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    for (const bool listed : {false, true}) {
      TestWeight source(dtype, 3, 64, 130, MOIRE_OUT_IN, listed);
      source.randomize(random);
      const TestCopy tiles(DType::kE4M3, MOIRE_SCALING_FP8_TILE, MOIRE_ROWWISE, 3, 64, 130);
      QuantizeWeightArgs args;
      args.source = source;
      args.scaling = MOIRE_SCALING_FP8_TILE;
      args.rowwise = tiles;
      ASSERT_TRUE(succeeds(quantize_weight(context, args)));
      EXPECT_TRUE(succeeds(context.check())) << "everything is finite";
      source.set(1, 6, 129, kNaN);
      source.set(2, 0, 0, kInfinity);
      ASSERT_TRUE(succeeds(quantize_weight(context, args)));
      EXPECT_TRUE(fails(context.check(), Code::kInvalidArgument,
                        "quantize_weight: source[1, 6, 129] is infinite or NaN"));
    }
  }
}

// 1 or NaN, in an element or a scale.
void put(TestTensor& t, int64_t row, int64_t column, double value) {
  const DType dtype = t.view().type();
  if (dtype == DType::kFP32) return t.set(row, column, value);
  const auto [one, nan] = dtype == DType::kE8M0 ? std::pair(127, 255) : std::pair(0x38, 0x7F);
  t.as<uint8_t>()[row * t.view().stride() + column] =
      static_cast<uint8_t>(std::isnan(value) ? nan : one);
}

// A ragged copy and one of weights, in either direction: by a code, and by a scale.
TEST(QuantizeFindings, OfWhatIsRequantisedNameTheElement) {
  const Tested context = Tested::finding(tested());
  const Batch batch({40, 0, kRows - 40});
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      for (const bool is_weight : {false, true}) {
        const auto copy = [&](int32_t of) {
          return is_weight ? TestCopy(DType::kE4M3, scaling, of, 3, 50, kColumns)
                           : TestCopy(DType::kE4M3, scaling, of, batch.groups(), kColumns);
        };
        TestCopy source = copy(direction);
        const TestCopy target = copy(1 - direction);
        for (TestTensor* t : {&source.data, &source.scales}) {
          for (int64_t i = 0; i < t->view().num_rows(); ++i) {
            for (int64_t j = 0; j < t->view().columns(); ++j) put(*t, i, j, 1);
          }
        }
        RequantizeArgs args;
        args.source = source;
        args.scaling = scaling;
        args.direction = direction;
        args.target = target;
        if (!is_weight) args.groups = batch.groups();
        ASSERT_TRUE(succeeds(requantize(context, args)));
        EXPECT_TRUE(succeeds(context.check())) << "everything is finite";
        put(source.data, 101, 37, kNaN);
        ASSERT_TRUE(succeeds(requantize(context, args)));
        EXPECT_TRUE(fails(context.check(), Code::kInvalidArgument,
                          is_weight ? "requantize: source[2, 1, 37], decoded, is infinite or NaN"
                                    : "requantize: source[101, 37], decoded, is infinite or NaN"));
        const int64_t scale = source.scales.view().columns() - 1;
        const int64_t block = direction == MOIRE_COLUMNWISE ? 1 : scale_block(scaling);
        put(source.scales, 0, scale, kNaN);
        ASSERT_TRUE(succeeds(requantize(context, args)));
        EXPECT_TRUE(fails(context.check(), Code::kInvalidArgument,
                          concat("requantize: source[0, ", is_weight ? "0, " : "", scale * block,
                                 "], decoded,")));
      }
    }
  }
}

// Memory for the copies of an output of kRows rows, in two groups.
struct Copies {
  explicit Copies(int64_t columns)
      : codes{TestTensor(DType::kE4M3, {kRows, columns}),
              TestTensor(DType::kE4M3, {kRows, columns})},
        scales{TestTensor(DType::kE8M0, {kRows, (columns + 31) / 32}),
               TestTensor(DType::kE8M0, {kRows / 32 + 2, columns})} {}
  moire_quantized rowwise() const { return {codes[0], scales[0]}; }
  moire_quantized columnwise() const { return {codes[1], scales[1]}; }
  TestTensor codes[2], scales[2];
};

// An output that is nowhere but in its copies: what overflows on the way is said all the same, the
// first element in the order of the rows, whichever thread met it.
TEST(QuantizeFindings, OfWhatAnEpilogueQuantisesNameTheElementOnce) {
  constexpr int64_t kF = 300;
  const Tested context = Tested::finding(tested(2));
  Random random;
  const Batch batch({40, kRows - 40});
  GemmOptions options;
  options.output = DType::kBF16;
  GemmGluCase c(random, batch, kF, 16, options);
  const Copies act(kF);
  GroupedGemmGluArgs args = c.args();
  args.z = args.act = {};
  args.act_rowwise = act.rowwise();
  args.act_columnwise = act.columnwise();
  ASSERT_TRUE(succeeds(run(context, args)));
  EXPECT_TRUE(succeeds(context.check())) << "everything is finite";
  c.bias.set(1, 37, 1e38);  // gates of the second group: times ups of more than 3
  c.bias.set(1, kF + 37, 1e38);
  c.bias.set(1, 290, kNaN);
  for (const bool columns_only : {false, true}) {
    if (columns_only) args.act_rowwise = {};
    ASSERT_TRUE(succeeds(run(Tested::finding(context), args)));
    EXPECT_TRUE(fails(context.check(), Code::kInvalidArgument,
                      "grouped_gemm_glu: act[40, 37] is infinite or NaN: infinities were"));
    EXPECT_TRUE(succeeds(context.check())) << "it was said once";
  }
}

TEST(QuantizeFindings, OfGradientsThatAnEpilogueQuantisesAreSaid) {
  constexpr int64_t kF = 300;
  const Tested context = Tested::finding(tested(2));
  Random random;
  const Batch batch({40, kRows - 40});
  for (const GluLayout& layout : {GluLayout::halves(), GluLayout::interleaved(1)}) {
    GemmOptions options;
    options.output = DType::kBF16;
    options.glu = layout;
    GemmGluBackwardCase c(random, batch, kF, 16, options);
    c.z.set(77, 210, kInfinity);
    c.z.set(90, 3, kNaN);
    const Copies grad_z(2 * kF), act(kF);
    GroupedGemmGluBackwardArgs args = c.args();
    args.grad_z = args.act = {};
    const auto check = [&](const std::string& found) {
      ASSERT_TRUE(succeeds(run(Tested::finding(context), args)));
      EXPECT_TRUE(fails(context.check(), Code::kInvalidArgument,
                        "grouped_gemm_glu_backward: " + found + " is infinite or NaN"));
    };
    args.grad_z_columnwise = grad_z.columnwise();
    args.act_columnwise = act.columnwise();
    check("grad_z[77, 210]");
    args.grad_z_columnwise = {};
    args.grad_z = c.grad_z;
    check(layout.block == 0 ? "act[77, 210]" : "act[77, 105]");
  }
}

}  // namespace
}  // namespace moire::test
