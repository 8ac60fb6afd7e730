// What a context's check() says after infinities and NaN were quantised: the first of them, once.
#include <gtest/gtest.h>
#include <moire/quantize.h>

#include <cmath>
#include <limits>
#include <string>

#include "tests/support/expect.h"
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
  const Context context = Context::create().value();
  for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    Call call(dtype, MOIRE_SCALING_MXFP8);
    call.source.set(3, 3, 60000);  // finite in each type
    ASSERT_TRUE(succeeds(quantize(context, call.args)));
    EXPECT_TRUE(succeeds(context.check()));
  }
}

TEST(QuantizeFindings, NameTheElementOnce) {
  const Context context = Context::create().value();
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
  const Context context = Context::create().value();
  Call call(DType::kBF16, MOIRE_SCALING_MXFP8);
  const Batch batch({100}, kRows - 100);
  call.source.set(120, 0, kInfinity);
  call.args.groups = batch.groups();
  ASSERT_TRUE(succeeds(quantize(context, call.args)));
  EXPECT_TRUE(succeeds(context.check()));
}

TEST(QuantizeFindings, OfWeightsAreSaid) {
  const Context context = Context::create().value();
  Random random;
  TestTensor source(DType::kBF16, {2, 64, 128}), codes(DType::kE4M3, {2, 64, 128}),
      scales(DType::kFP32, {2, 1, 1});
  source.randomize(random);
  source.set(70, 5, kNaN);
  QuantizeWeightArgs args;
  args.source = Weight(source);
  args.scaling = MOIRE_SCALING_FP8_TILE;
  args.rowwise = {codes, scales};
  ASSERT_TRUE(succeeds(quantize_weight(context, args)));
  EXPECT_TRUE(fails(context.check(), Code::kInvalidArgument, "quantize_weight: an element"));
}

}  // namespace
}  // namespace moire::test
