// dequantize, requantize and convert_scales against the reference, on any codes and any scales.
#include <gtest/gtest.h>
#include <moire/quantize.h>

#include "tests/ops/quantize_support.h"
#include "tests/support/ragged.h"

namespace moire::test {
namespace {

constexpr DType kTargets[] = {DType::kFP32, DType::kBF16, DType::kFP16};
constexpr DType kElements[] = {DType::kE4M3, DType::kE5M2};

void fill_ragged(const TestCopy& copy, int32_t direction, const Groups& groups, int64_t block,
                 Random& random) {
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    const int64_t first = groups.offsets[g], rows = groups.offsets[g + 1] - first;
    for (int64_t i = 0; i < rows; ++i) {
      fill_row(copy.data, first + i, random);
      if (direction == MOIRE_ROWWISE) fill_row(copy.scales, first + i, random);
    }
    for (int64_t i = 0; direction == MOIRE_COLUMNWISE && i * block < rows; ++i) {
      fill_row(copy.scales, first / block + g + i, random);
    }
  }
}
int32_t random_tail(Random& random) {
  return random.integer(0, 1) == 0 ? MOIRE_TAIL_ZERO : MOIRE_TAIL_UNTOUCHED;
}

class Decode : public testing::TestWithParam<RaggedCase> {};
INSTANTIATE_TEST_SUITE_P(Table, Decode, testing::ValuesIn(ragged_table()), case_name);

TEST_P(Decode, DequantizeGivesDataTimesScale) {
  Random random;
  const Batch batch(GetParam());
  const Tested device = Tested::finding(tested(2));
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      const int64_t k = any_of(random, kWidths), padding = random.integer(0, 1) * 3;
      const TestCopy source(any_of(random, kElements), scaling, direction, batch.groups(), k,
                            padding);
      fill_ragged(source, direction, batch.groups(), scale_block(scaling), random);
      const TestTensor target(any_of(random, kTargets), {batch.capacity(), k}, padding);
      DequantizeArgs args;
      args.source = source;
      args.scaling = scaling;
      args.direction = direction;
      args.target = target;
      args.groups = batch.groups();
      args.tail = random_tail(random);
      ASSERT_TRUE(succeeds(run(device, args)));
      EXPECT_TRUE(matches(target, reference::dequantize(args), batch.groups()))
          << scaling_name(scaling) << " direction " << direction;
      EXPECT_TRUE(args.tail == MOIRE_TAIL_ZERO ? tail_is_zero(target, batch.groups())
                                               : tail_is_untouched(target, batch.groups()));
      EXPECT_TRUE(target.is_undamaged());
    }
  }
}

TEST_P(Decode, RequantizeGivesTheBytesOfDecodingAndQuantisingAgain) {
  Random random;
  const Batch batch(GetParam());
  const Tested device = Tested::finding(tested(2));
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      const int64_t k = any_of(random, kWidths);
      const TestCopy source(any_of(random, kElements), scaling, direction, batch.groups(), k);
      fill_ragged(source, direction, batch.groups(), scale_block(scaling), random);
      const TestCopy target(any_of(random, kElements), scaling, 1 - direction, batch.groups(), k,
                            2);
      RequantizeArgs args;
      args.source = source;
      args.scaling = scaling;
      args.direction = direction;
      args.fractional_scales = scaling == MOIRE_SCALING_FP8_BLOCK ? 1 : 0;
      args.target = target;
      args.groups = batch.groups();
      args.tail = random_tail(random);
      ASSERT_TRUE(succeeds(run(device, args)));
      EXPECT_TRUE(same_bytes(target, reference::requantize(args), args.tail))
          << scaling_name(scaling) << " direction " << direction;
    }
  }
}

TEST(Decode, WeightsInEveryScaling) {
  Random random;
  const Tested device = Tested::finding(tested());
  for (const int32_t scaling :
       {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK, MOIRE_SCALING_FP8_TILE}) {
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      for (const int64_t n : {0, 1, 33, 130}) {
        const int64_t k = any_of(random, kWidths);
        const TestCopy source(any_of(random, kElements), scaling, direction, 3, n, k);
        fill_all(source, random);
        const TestTensor target(any_of(random, kTargets), {3, n, k});
        DequantizeArgs args;
        args.source = source;
        args.scaling = scaling;
        args.direction = direction;
        args.target = target;
        ASSERT_TRUE(succeeds(run(device, args)));
        EXPECT_TRUE(matches(target, reference::dequantize(args)));
        if (scaling == MOIRE_SCALING_FP8_TILE) continue;
        const TestCopy other(DType::kE4M3, scaling, 1 - direction, 3, n, k);
        RequantizeArgs again;
        again.source = source;
        again.scaling = scaling;
        again.direction = direction;
        again.target = other;
        ASSERT_TRUE(succeeds(run(device, again)));
        EXPECT_TRUE(same_bytes(other, reference::requantize(again)));
      }
    }
  }
}

TEST(Decode, EveryScaleCodeTimesEveryCode) {
  // Row r has scale code r; every code is in it.
  for (const DType element : kElements) {
    TestTensor data(element, {256, 256}), target(DType::kFP32, {256, 256});
    TestTensor scales(DType::kE8M0, {256, 8});
    for (int i = 0; i < 65536; ++i) data.as<uint8_t>()[i] = static_cast<uint8_t>(i % 256);
    for (int i = 0; i < 2048; ++i) scales.as<uint8_t>()[i] = static_cast<uint8_t>(i / 8);
    DequantizeArgs args;
    args.source = Quantized(data, scales);
    args.scaling = MOIRE_SCALING_MXFP8;
    args.target = target;
    ASSERT_TRUE(succeeds(run(Tested::finding(tested()), args)));
    EXPECT_TRUE(matches(target, reference::dequantize(args)));
  }
}

TEST(Decode, DecodingWhatWasQuantisedIsWithinHalfAStepOfTheBlock) {
  Random random;
  TestTensor source(DType::kBF16, {40, 96}), target(DType::kFP32, {40, 96});
  source.randomize(random);
  const TestCopy copy(DType::kE4M3, MOIRE_SCALING_MXFP8, MOIRE_ROWWISE, Groups(nullptr, 1, 40), 96);
  QuantizeArgs args;
  args.source = source;
  args.scaling = MOIRE_SCALING_MXFP8;
  args.rowwise = copy;
  ASSERT_TRUE(succeeds(quantize(tested(), args)));
  DequantizeArgs back;
  back.source = copy;
  back.scaling = MOIRE_SCALING_MXFP8;
  back.target = target;
  ASSERT_TRUE(succeeds(dequantize(tested(), back)));
  for (int64_t i = 0; i < 40; ++i) {
    for (int64_t j = 0; j < 96; ++j) {
      double amax = 0;
      for (int64_t c = j / 32 * 32; c < j / 32 * 32 + 32; ++c) {
        amax = std::max(amax, std::fabs(source.get(i, c)));
      }
      const double step = std::max(std::fabs(source.get(i, j)) / 8, 2 * amax / 448 * 0x1p-9);
      ASSERT_LE(std::fabs(target.get(i, j) - source.get(i, j)), step / 2) << i << ", " << j;
    }
  }
}

struct LayoutCase {
  int32_t direction, layout;
};
constexpr LayoutCase kLayoutCases[] = {
    {MOIRE_ROWWISE, MOIRE_SCALES_CANONICAL},    {MOIRE_ROWWISE, MOIRE_SCALES_DENSE},
    {MOIRE_ROWWISE, MOIRE_SCALES_PADDED},       {MOIRE_ROWWISE, MOIRE_SCALES_SWIZZLED},
    {MOIRE_COLUMNWISE, MOIRE_SCALES_CANONICAL}, {MOIRE_COLUMNWISE, MOIRE_SCALES_DENSE},
    {MOIRE_COLUMNWISE, MOIRE_SCALES_PADDED},    {MOIRE_COLUMNWISE, MOIRE_SCALES_SWIZZLED}};

TEST_P(Decode, ScalesGoToEveryLayoutAndComeBack) {
  Random random;
  const Batch batch(GetParam());
  for (const auto& [direction, layout] : kLayoutCases) {
    const int64_t k = any_of(random, kWidths);
    const TestCopy copy(DType::kE4M3, MOIRE_SCALING_MXFP8, direction, batch.groups(), k, 2);
    fill_ragged(copy, direction, batch.groups(), 32, random);
    const TestTensor there = scales_in(layout, direction, batch.groups(), k);
    const TestTensor back(DType::kE8M0, {copy.scales.view().shape[0], copy.scales.view().shape[1]},
                          3 * random.integer(0, 1));
    ConvertScalesArgs args;
    args.source = copy.scales;
    args.target = there;
    args.to = layout;
    args.direction = direction;
    args.k = k;
    args.groups = batch.groups();
    SCOPED_TRACE(testing::Message() << "direction " << direction << ", layout " << layout);
    ASSERT_TRUE(succeeds(convert_scales(tested(), args)));
    EXPECT_TRUE(same_bytes(there.view(), reference::convert_scales(args), MOIRE_TAIL_ZERO));
    EXPECT_TRUE(there.is_undamaged());
    ConvertScalesArgs reverse = args;
    reverse.source = there;
    reverse.target = back;
    reverse.from = layout;
    reverse.to = MOIRE_SCALES_CANONICAL;
    ASSERT_TRUE(succeeds(convert_scales(tested(3), reverse)));
    EXPECT_TRUE(same_bytes(back.view(), reference::convert_scales(reverse), MOIRE_TAIL_ZERO));
    EXPECT_TRUE(back.is_undamaged());
    // What a block owns has come back as it was.
    ConvertScalesArgs again = args;
    const TestTensor twice = scales_in(layout, direction, batch.groups(), k);
    again.source = back;
    again.target = twice;
    ASSERT_TRUE(succeeds(convert_scales(tested(), again)));
    EXPECT_TRUE(same_bits(twice, there));
  }
}

TEST(ScalesShape, IsThatOfTheHeader) {
  const auto shape = [](int32_t scaling, int32_t direction, int32_t layout, int64_t rows, int64_t k,
                        int64_t groups) {
    int64_t out[2] = {-1, -1};
    EXPECT_TRUE(succeeds(scales_shape(scaling, direction, layout, rows, k, groups, out)));
    return std::pair(out[0], out[1]);
  };
  const auto mx = MOIRE_SCALING_MXFP8;
  EXPECT_EQ(shape(mx, MOIRE_ROWWISE, 0, 100, 65, 4), std::pair(int64_t{100}, int64_t{3}));
  EXPECT_EQ(shape(mx, MOIRE_COLUMNWISE, 0, 100, 65, 4), std::pair(int64_t{7}, int64_t{65}));
  EXPECT_EQ(shape(MOIRE_SCALING_FP8_BLOCK, MOIRE_ROWWISE, 0, 100, 300, 4),
            std::pair(int64_t{100}, int64_t{3}));
  EXPECT_EQ(shape(MOIRE_SCALING_FP8_BLOCK, MOIRE_COLUMNWISE, 0, 300, 65, 4),
            std::pair(int64_t{6}, int64_t{65}));
  EXPECT_EQ(shape(MOIRE_SCALING_FP8_TILE, MOIRE_ROWWISE, 0, 300, 129, 0),
            std::pair(int64_t{3}, int64_t{2}));
  EXPECT_EQ(shape(mx, MOIRE_ROWWISE, MOIRE_SCALES_SWIZZLED, 300, 65, 2),
            std::pair(int64_t{512}, int64_t{4}));
  EXPECT_EQ(shape(mx, MOIRE_COLUMNWISE, MOIRE_SCALES_PADDED, 300, 65, 2),
            std::pair(int64_t{16}, int64_t{128}));
}

}  // namespace
}  // namespace moire::test
