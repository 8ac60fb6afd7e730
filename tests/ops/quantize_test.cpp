// quantize and quantize_weight: every byte of codes and scales against the reference.
#include <gtest/gtest.h>
#include <moire/grouped_gemm.h>
#include <moire/quantize.h>

#include <ostream>

#include "tests/ops/quantize_support.h"
#include "tests/support/ragged.h"

namespace moire::test {
namespace {

constexpr DType kSources[] = {DType::kFP32, DType::kBF16, DType::kFP16};
constexpr DType kElements[] = {DType::kE4M3, DType::kE5M2};

// One call with everything random but the groups.
struct QuantizeCase {
  QuantizeCase(Random& random, const Batch& batch, bool with_rowwise, bool with_columnwise)
      : k(any_of(random, kWidths)) {
    const int64_t padding = random.integer(0, 1) * 5;
    const bool gathered = random.integer(0, 1) == 1;
    const int64_t source_rows = gathered ? 11 : batch.capacity();
    source = TestTensor(any_of(random, kSources), {source_rows, k}, padding);
    fill_hard(source, random, gathered ? source_rows : batch.rows());
    if (gathered) {
      std::vector<int64_t> rows(static_cast<size_t>(batch.capacity()), -1);
      for (int64_t i = 0; i < batch.rows(); ++i) {
        rows[static_cast<size_t>(i)] = random.integer(0, source_rows - 1);
      }
      row_idx = index_tensor(random.integer(0, 1) == 0 ? DType::kInt32 : DType::kInt64, rows);
    }
    args.scaling = random.integer(0, 1) == 0 ? MOIRE_SCALING_MXFP8 : MOIRE_SCALING_FP8_BLOCK;
    args.fractional_scales =
        args.scaling == MOIRE_SCALING_FP8_BLOCK ? static_cast<int32_t>(random.integer(0, 1)) : 0;
    args.tail = random.integer(0, 1) == 0 ? MOIRE_TAIL_ZERO : MOIRE_TAIL_UNTOUCHED;
    if (with_rowwise) {
      rowwise = {
          any_of(random, kElements), args.scaling, MOIRE_ROWWISE, batch.groups(), k, padding};
    }
    if (with_columnwise) {
      columnwise = {
          any_of(random, kElements), args.scaling, MOIRE_COLUMNWISE, batch.groups(), k, padding};
    }
    args.source = source;
    args.row_idx = row_idx;
    args.rowwise = rowwise;
    args.columnwise = columnwise;
    args.groups = batch.groups();
  }
  void expect_the_bytes_of_the_reference() const {
    const reference::QuantizeResults want = reference::quantize(args);
    EXPECT_TRUE(same_bytes(rowwise, want.rowwise, args.tail)) << "rowwise, " << *this;
    EXPECT_TRUE(same_bytes(columnwise, want.columnwise, args.tail)) << "columnwise, " << *this;
  }
  friend std::ostream& operator<<(std::ostream& out, const QuantizeCase& c) {
    return out << to_string(c.source.view()) << (c.row_idx.view().is_present() ? ", gathered" : "")
               << ", " << scaling_name(c.args.scaling) << ", fractional "
               << c.args.fractional_scales << ", " << to_string(c.rowwise.data.view()) << " and "
               << to_string(c.columnwise.data.view());
  }

  int64_t k;
  TestTensor source, row_idx;
  TestCopy rowwise, columnwise;
  QuantizeArgs args;
};

class Quantize : public testing::TestWithParam<RaggedCase> {};
INSTANTIATE_TEST_SUITE_P(Table, Quantize, testing::ValuesIn(ragged_table()), case_name);

TEST_P(Quantize, GivesTheBytesOfTheReferenceInEitherDirectionAndInBoth) {
  Random random;
  const Batch batch(GetParam());
  const Tested device = Tested::finding(tested());
  for (int i = 0; i < 4; ++i) {
    for (const auto& [with_rowwise, with_columnwise] :
         {std::pair(true, false), std::pair(false, true), std::pair(true, true)}) {
      const QuantizeCase c(random, batch, with_rowwise, with_columnwise);
      ASSERT_TRUE(succeeds(quantize(device, c.args))) << c;
      c.expect_the_bytes_of_the_reference();
    }
  }
}

TEST_P(Quantize, SumsABiasInTheSameReadToTheBitsOfBiasBackward) {
  Random random;
  const Batch batch(GetParam());
  const Tested device = Tested::finding(tested(3));
  for (const auto& [with_rowwise, with_columnwise] :
       {std::pair(true, false), std::pair(false, true), std::pair(true, true)}) {
    for (const int32_t beta : {0, 1, 2}) {
      QuantizeCase c(random, batch, with_rowwise, with_columnwise);
      std::vector<uint8_t> betas(static_cast<size_t>(batch.num_groups()) + 1);
      for (uint8_t& b : betas) b = static_cast<uint8_t>(random.integer(0, 1));
      TestTensor sums(any_of(random, kSources), {batch.num_groups(), c.k}, 2);
      if (beta != 0) sums.randomize(random);
      const TestTensor want = sums;
      c.args.grad_bias = sums;
      c.args.beta = beta % 2;
      if (beta == 2) c.args.beta_per_group = betas.data();
      BiasBackwardArgs bias;
      bias.grad_y = c.source;
      bias.row_idx = c.row_idx;
      bias.grad_bias = want;
      bias.beta = c.args.beta;
      bias.beta_per_group = c.args.beta_per_group;
      bias.groups = c.args.groups;
      ASSERT_TRUE(succeeds(run(device, bias))) << c;
      ASSERT_TRUE(succeeds(run(device, c.args))) << c;
      EXPECT_TRUE(same_bits(sums, want)) << c << ", beta " << beta;
      EXPECT_TRUE(sums.is_undamaged()) << c;
      c.expect_the_bytes_of_the_reference();
    }
  }
}

TEST_P(Quantize, ValuesAreTheCopiesDecoded) {
  Random random;
  const Batch batch(GetParam());
  const Tested device = Tested::finding(tested());
  if (device.device() == Device::kCpu) GTEST_SKIP() << "values are made by GPUs";
  for (const auto& [with_rowwise, with_columnwise] :
       {std::pair(true, false), std::pair(false, true), std::pair(true, true)}) {
    QuantizeCase c(random, batch, with_rowwise, with_columnwise);
    c.args.scaling = MOIRE_SCALING_MXFP8;
    c.args.fractional_scales = 0;
    const int64_t padding = 8 * random.integer(0, 2) + random.integer(0, 1);
    const auto memory = [&] { return TestTensor(DType::kBF16, {batch.capacity(), c.k}, padding); };
    const bool is_asked_for[] = {with_rowwise, with_columnwise};
    const TestTensor values[] = {memory(), memory()};
    c.args.rowwise = c.args.columnwise = {};
    if (with_rowwise) c.args.rowwise = Quantized(values[0], {});
    if (with_columnwise) c.args.columnwise = Quantized(values[1], {});
    ASSERT_TRUE(succeeds(quantize(device, c.args))) << c;
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      if (!is_asked_for[direction]) continue;
      const TestCopy codes(DType::kE4M3, MOIRE_SCALING_MXFP8, direction, batch.groups(), c.k);
      const TestTensor decoded = memory();
      c.args.rowwise = c.args.columnwise = {};
      (direction == MOIRE_ROWWISE ? c.args.rowwise : c.args.columnwise) = codes;
      ASSERT_TRUE(succeeds(quantize(device, c.args))) << c;
      DequantizeArgs decode;
      decode.source = codes;
      decode.scaling = MOIRE_SCALING_MXFP8;
      decode.direction = direction;
      decode.target = decoded;
      decode.groups = batch.groups();
      decode.tail = c.args.tail;
      ASSERT_TRUE(succeeds(dequantize(device, decode)));
      EXPECT_TRUE(same_bits(values[direction], decoded)) << c << ", direction " << direction;
      EXPECT_TRUE(values[direction].is_undamaged()) << c;
    }
  }
}

TEST(QuantizeOp, AbsentGroupsAreOneGroupOfAllRows) {
  Random random;
  const Batch batch(RaggedCase{"", {70}});
  for (int i = 0; i < 20; ++i) {
    QuantizeCase c(random, batch, true, true);
    c.args.groups = {};
    ASSERT_TRUE(succeeds(quantize(cpu(2), c.args))) << c;
    c.expect_the_bytes_of_the_reference();
  }
}

TEST(QuantizeOp, WideRowsAreCutIntoStripsWithoutASeam) {
  Random random;
  const Batch batch(RaggedCase{"", {33, 130}, 1});
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    TestTensor source(DType::kBF16, {batch.capacity(), 5000});
    fill_hard(source, random, batch.rows());
    const TestCopy rowwise(DType::kE4M3, scaling, MOIRE_ROWWISE, batch.groups(), 5000);
    const TestCopy columnwise(DType::kE4M3, scaling, MOIRE_COLUMNWISE, batch.groups(), 5000);
    QuantizeArgs args;
    args.source = source;
    args.scaling = scaling;
    args.rowwise = rowwise;
    args.columnwise = columnwise;
    args.groups = batch.groups();
    ASSERT_TRUE(succeeds(quantize(cpu(3), args)));
    const reference::QuantizeResults want = reference::quantize(args);
    EXPECT_TRUE(same_bytes(rowwise, want.rowwise));
    EXPECT_TRUE(same_bytes(columnwise, want.columnwise));
  }
}

// One block of 32 equal values; its scale and the code of each.
struct Quantised {
  int scale, code;
};
Quantised quantise_one(DType element, float value) {
  TestTensor source(DType::kFP32, {1, 32});
  for (int j = 0; j < 32; ++j) source.as<float>()[j] = value;
  TestCopy copy(element, MOIRE_SCALING_MXFP8, MOIRE_ROWWISE, Groups(nullptr, 1, 1), 32);
  QuantizeArgs args;
  args.source = source;
  args.scaling = MOIRE_SCALING_MXFP8;
  args.rowwise = copy;
  EXPECT_TRUE(succeeds(quantize(cpu(1), args)));
  return {copy.scales.as<uint8_t>()[0], copy.data.as<uint8_t>()[31]};
}
void expect_mx(DType element, float value, int scale, int code) {
  const Quantised got = quantise_one(element, value);
  EXPECT_EQ(got.scale, scale) << value;
  EXPECT_EQ(got.code, code) << value;
}

TEST(QuantizeOp, KnownBlocksHaveKnownScales) {
  constexpr DType e4m3 = DType::kE4M3, e5m2 = DType::kE5M2;
  expect_mx(e4m3, 0.0F, 0, 0x00);
  expect_mx(e4m3, -0.0F, 0, 0x80);
  expect_mx(e4m3, 448.0F, 127, 0x7E);
  expect_mx(e4m3, std::nextafter(448.0F, 500.0F), 128, 0x76);  // 224.00002 rounds to 224
  expect_mx(e4m3, 449.0F, 128, 0x76);
  expect_mx(e4m3, 1.0F, 119, 0x78);  // 1 / 448 lies between 2^-9 and 2^-8: 256 * 2^-8
  expect_mx(e4m3, -1.0F, 119, 0xF8);
  expect_mx(e5m2, 57344.0F, 127, 0x7B);
  expect_mx(e5m2, 1.0F, 112, 0x78);
  expect_mx(e4m3, std::numeric_limits<float>::infinity(), 254, 0x7E);
  expect_mx(e4m3, std::numeric_limits<float>::max(), 247, 0x78);
  expect_mx(e4m3, std::numeric_limits<float>::quiet_NaN(), 0, 0x7F);
  expect_mx(e4m3, 0x1p-149F, 0, 0x00);
  // 448 * 2^-127 is the last amax of scale 0; the next scale is 2^-126.
  expect_mx(e4m3, 448 * 0x1p-127F, 0, 0x7E);
  expect_mx(e4m3, 449 * 0x1p-127F, 1, 0x76);
}

TEST(QuantizeOp, ANanElementIsAloneInItsBlock) {
  TestTensor source(DType::kBF16, {1, 32});
  source.fill(3);
  source.set(0, 7, std::numeric_limits<double>::quiet_NaN());
  TestCopy copy(DType::kE4M3, MOIRE_SCALING_MXFP8, MOIRE_ROWWISE, Groups(nullptr, 1, 1), 32);
  QuantizeArgs args;
  args.source = source;
  args.scaling = MOIRE_SCALING_MXFP8;
  args.rowwise = copy;
  ASSERT_TRUE(succeeds(quantize(cpu(1), args)));
  for (int j = 0; j < 32; ++j) EXPECT_EQ(copy.data.as<uint8_t>()[j], j == 7 ? 0x7F : 0x7C) << j;
}

TEST(QuantizeOp, EveryBF16NumberIsQuantisedAsTheReferenceHasIt) {
  // Each number fills a block by itself, and then beside 1.
  for (const DType element : kElements) {
    for (const bool beside_one : {false, true}) {
      TestTensor source(DType::kBF16, {2048, 32});
      for (int64_t i = 0; i < 65536; ++i) {
        const auto bits = static_cast<uint16_t>(i);
        source.as<uint16_t>()[i] = beside_one && i % 2 == 0 ? uint16_t{0x3F80} : bits;
      }
      const TestCopy copy(element, MOIRE_SCALING_MXFP8, MOIRE_ROWWISE, Groups(nullptr, 1, 2048),
                          32);
      QuantizeArgs args;
      args.source = source;
      args.scaling = MOIRE_SCALING_MXFP8;
      args.rowwise = copy;
      ASSERT_TRUE(succeeds(quantize(Tested::finding(tested()), args)));
      EXPECT_TRUE(same_bytes(copy, reference::quantize(args).rowwise));
    }
  }
}

TEST(QuantizeOp, BitsDoNotDependOnThreads) {
  Random random;
  const Batch batch(RaggedCase{"", {100, 0, 65, 1}});
  QuantizeCase c(random, batch, true, true);
  for (const int threads : {1, 2, 5}) {
    c.rowwise.data.poison();
    c.columnwise.data.poison();
    ASSERT_TRUE(succeeds(quantize(cpu(threads), c.args)));
    c.expect_the_bytes_of_the_reference();
  }
}

struct WeightOptions {
  DType source, element;
  int32_t scaling, fractional, layout;
  bool listed;
};

void expect_weight(Random& random, const WeightOptions& o, int64_t num_groups, int64_t n,
                   int64_t k) {
  const bool out_in = o.layout == MOIRE_OUT_IN;
  TestWeight source(o.source, num_groups, out_in ? n : k, out_in ? k : n, o.layout, o.listed);
  for (int64_t g = 0; g < num_groups; ++g) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        source.set(g, out_in ? i : j, out_in ? j : i, hard_value(random, i, j));
      }
    }
  }
  const TestCopy rowwise(o.element, o.scaling, MOIRE_ROWWISE, num_groups, n, k, 3);
  const TestCopy columnwise =
      o.scaling == MOIRE_SCALING_FP8_TILE
          ? TestCopy()
          : TestCopy(o.element, o.scaling, MOIRE_COLUMNWISE, num_groups, n, k);
  QuantizeWeightArgs args;
  args.source = source;
  args.scaling = o.scaling;
  args.fractional_scales = o.fractional;
  args.rowwise = rowwise;
  args.columnwise = columnwise;
  SCOPED_TRACE(testing::Message() << to_string(TensorView(args.source.tensor)) << " listed "
                                  << o.listed << ", " << scaling_name(o.scaling));
  ASSERT_TRUE(succeeds(quantize_weight(Tested::finding(tested()), args)));
  const reference::QuantizeResults want = reference::quantize_weight(args);
  EXPECT_TRUE(same_bytes(rowwise, want.rowwise));
  EXPECT_TRUE(same_bytes(columnwise, want.columnwise));
}

// Without groups a transposed copy would have this shape too.
TEST(Quantize, TakesNoGroupsOfAsManyRowsAsColumns) {
  const TestTensor source(DType::kBF16, {128, 128});
  const int64_t none = 0;
  const Groups groups(&none, 0, 128);
  const TestCopy columnwise(DType::kE4M3, MOIRE_SCALING_FP8_BLOCK, MOIRE_COLUMNWISE, groups, 128);
  QuantizeArgs args;
  args.source = source;
  args.scaling = MOIRE_SCALING_FP8_BLOCK;
  args.columnwise = columnwise;
  args.groups = groups;
  args.tail = MOIRE_TAIL_ZERO;
  ASSERT_TRUE(succeeds(quantize(Tested::finding(tested()), args)));
  EXPECT_EQ(columnwise.data.get(127, 127), 0);
}

TEST(QuantizeWeight, GivesTheBytesOfTheReferenceForEveryScalingPackedOrListed) {
  Random random;
  for (const int32_t scaling :
       {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK, MOIRE_SCALING_FP8_TILE}) {
    for (const int64_t num_groups : {0, 1, 3}) {
      for (const int64_t n : {0, 1, 32, 100, 129, 200}) {
        const int64_t k = any_of(random, kWidths);
        const auto fractional = static_cast<int32_t>(random.integer(0, 1));
        expect_weight(random,
                      {any_of(random, kSources), any_of(random, kElements), scaling,
                       scaling == MOIRE_SCALING_MXFP8 ? 0 : fractional,
                       static_cast<int32_t>(random.integer(0, 1)), random.integer(0, 1) == 1},
                      num_groups, n, k);
      }
    }
  }
}

}  // namespace
}  // namespace moire::test
