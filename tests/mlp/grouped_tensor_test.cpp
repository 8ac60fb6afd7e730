// GroupedTensor: what its views show is what the ops make; wrong use is a sentence.
#include <gtest/gtest.h>
#include <moire/grouped_tensor.h>

#include <algorithm>
#include <cstring>

#include "tests/support/expect.h"
#include "tests/support/ragged.h"
#include "tests/support/tensors.h"

namespace moire::test {
namespace {

GroupedTensorOptions both(int32_t scaling) {
  GroupedTensorOptions options;
  options.scaling = scaling;
  options.columnwise = scaling != MOIRE_SCALING_FP8_TILE;
  return options;
}

void expect_same(const GroupedTensorView& got, const GroupedTensorView& want) {
  for (const auto& [a, b] :
       {std::pair{got.rowwise, want.rowwise}, std::pair{got.columnwise, want.columnwise}}) {
    ASSERT_EQ(a.is_present(), b.is_present());
    if (!a.is_present()) continue;
    EXPECT_TRUE(same_bits(a.data, b.data));
    EXPECT_TRUE(same_bits(a.scales, b.scales));
  }
}

// Each matrix of a ragged batch, as a batch of its own, dequantises to the rows of the whole.
TEST(GroupedTensor, MatricesOfARaggedBatchAreItsRows) {
  Random random;
  for (const RaggedCase& ragged : ragged_table()) {
    for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
      SCOPED_TRACE(testing::Message() << ragged.name << ", scaling " << scaling);
      const Batch batch(ragged);
      if (batch.groups().num_groups == 0) continue;
      constexpr int64_t kColumns = 40;
      TestTensor x(DType::kBF16, {batch.capacity(), kColumns});
      x.randomize_rows(random, batch.rows());
      for (const bool rowwise : {true, false}) {
        GroupedTensorOptions options = both(scaling);
        options.rowwise = rowwise;
        options.columnwise = !rowwise;
        Result<GroupedTensor> made = GroupedTensor::ragged(batch.groups(), kColumns, options);
        ASSERT_TRUE(succeeds(made.status()));
        const GroupedTensor t = std::move(made).value();
        ASSERT_TRUE(succeeds(quantize(cpu(), x, t)));
        TestTensor whole(DType::kFP32, {batch.capacity(), kColumns});
        ASSERT_TRUE(succeeds(dequantize(cpu(), t, whole)));
        for (int64_t g = 0; g < t.view().num_matrices(); ++g) {
          const int64_t first = batch.groups().offsets[g];
          const int64_t rows = batch.groups().offsets[g + 1] - first;
          TestTensor part(DType::kFP32, {rows, kColumns});
          ASSERT_TRUE(succeeds(dequantize(cpu(), t.view().matrix(g), part)));
          for (int64_t i = 0; i < rows; ++i) {
            for (int64_t j = 0; j < kColumns; ++j) {
              ASSERT_EQ(part.get(i, j), whole.get(first + i, j)) << g << ": " << i << ", " << j;
            }
          }
        }
      }
    }
  }
}

TEST(GroupedTensor, MatricesOfAUniformBatchAreItsMatrices) {
  Random random;
  for (const int32_t scaling :
       {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK, MOIRE_SCALING_FP8_TILE}) {
    TestWeight w(DType::kFP32, 3, 70, 40);
    w.randomize(random);
    Result<GroupedTensor> made = GroupedTensor::uniform(3, 70, 40, both(scaling));
    ASSERT_TRUE(succeeds(made.status()));
    const GroupedTensor t = std::move(made).value();
    ASSERT_TRUE(succeeds(quantize(cpu(), Weight(w), t)));
    EXPECT_TRUE(t.view().all_same_shape());
    TestTensor whole(DType::kFP32, {3, 70, 40});
    ASSERT_TRUE(succeeds(dequantize(cpu(), t, whole)));
    for (int64_t g = 0; g < 3; ++g) {
      TestTensor part(DType::kFP32, {1, 70, 40});
      ASSERT_TRUE(succeeds(dequantize(cpu(), t.view().matrix(g), part)));
      for (int64_t i = 0; i < 70; ++i) {
        for (int64_t j = 0; j < 40; ++j) ASSERT_EQ(part.get(i, j), whole.get(g * 70 + i, j));
      }
    }
  }
}

TEST(GroupedTensor, CloneHasTheBytesInMemoryOfItsOwn) {
  Random random;
  const Batch batch({"Two", {33, 5}, 2});
  TestTensor x(DType::kFP32, {batch.capacity(), 64});
  x.randomize_rows(random, batch.rows());
  Result<GroupedTensor> made = GroupedTensor::ragged(batch.groups(), 64, both(MOIRE_SCALING_MXFP8));
  ASSERT_TRUE(succeeds(made.status()));
  const GroupedTensor t = std::move(made).value();
  ASSERT_TRUE(succeeds(quantize(cpu(), x, t)));
  Result<GroupedTensor> cloned = t.clone();
  ASSERT_TRUE(succeeds(cloned.status()));
  const GroupedTensor copy = std::move(cloned).value();
  expect_same(copy, t);
  EXPECT_NE(copy.view().rowwise.data.data, t.view().rowwise.data.data);
  std::memset(copy.view().rowwise.data.data, 0, 64);
  EXPECT_FALSE(same_bits(copy.view().rowwise.data, t.view().rowwise.data));
  EXPECT_EQ(t.view().nbytes(), 40 * 64 * 2 + 40 * 2 + (40 / 32 + 2) * 64);
  EXPECT_FALSE(t.view().all_same_shape());
}

TEST(GroupedTensor, RowsInGroupsAreRaggedThoughTheirSplitsAreEqual) {
  const Batch batch({"Equal", {4, 4}, 0});
  Result<GroupedTensor> made = GroupedTensor::ragged(batch.groups(), 64);
  ASSERT_TRUE(succeeds(made.status()));
  const GroupedTensor t = std::move(made).value();
  EXPECT_FALSE(t.view().all_same_shape());
  GroupedTensorView whole = t;
  whole.groups = Groups();
  EXPECT_TRUE(whole.all_same_shape());
}

TEST(GroupedTensor, RequantizeGivesTheOtherDirection) {
  Random random;
  const Batch batch({"Two", {33, 70}, 1});
  TestTensor x(DType::kBF16, {batch.capacity(), 64});
  x.randomize_rows(random, batch.rows());
  Result<GroupedTensor> made = GroupedTensor::ragged(batch.groups(), 64, both(MOIRE_SCALING_MXFP8));
  ASSERT_TRUE(succeeds(made.status()));
  const GroupedTensor t = std::move(made).value();
  GroupedTensorView rowwise = t, columnwise = t;
  rowwise.columnwise = Quantized();
  columnwise.rowwise = Quantized();
  ASSERT_TRUE(succeeds(quantize(cpu(), x, rowwise)));
  ASSERT_TRUE(succeeds(requantize(cpu(), rowwise, t)));
  TestTensor decoded(DType::kFP32, {batch.capacity(), 64});
  ASSERT_TRUE(succeeds(dequantize(cpu(), rowwise, decoded)));
  Result<GroupedTensor> wanted =
      GroupedTensor::ragged(batch.groups(), 64, both(MOIRE_SCALING_MXFP8));
  const GroupedTensor want = std::move(wanted).value();
  ASSERT_TRUE(succeeds(quantize(cpu(), decoded, want)));
  EXPECT_TRUE(same_bits(t.view().columnwise.data, want.view().columnwise.data, batch.rows()));
  EXPECT_TRUE(fails(requantize(cpu(), rowwise, rowwise), Code::kInvalidArgument,
                    "source is rowwise, but target has no columnwise copy to write"));
}

TEST(GroupedTensor, RequantizeNeedsTheSameGroups) {
  const Batch forty({"Forty", {40, 60}, 0}), fifty({"Fifty", {50, 50}, 0});
  const auto made = [](const Batch& batch) {
    return GroupedTensor::ragged(batch.groups(), 64, both(MOIRE_SCALING_MXFP8)).value();
  };
  const GroupedTensor source = made(forty), target = made(fifty);
  GroupedTensorView rowwise = source;
  rowwise.columnwise = Quantized();
  EXPECT_TRUE(fails(requantize(cpu(), rowwise, target), Code::kInvalidArgument,
                    "source and target have different groups"));
}

TEST(GroupedTensor, ConvertGluChecksEveryPartBeforeItWrites) {
  GroupedTensorView source, target;
  const GroupedTensor from = GroupedTensor::uniform(2, 128, 64, both(MOIRE_SCALING_MXFP8)).value();
  const GroupedTensor to = GroupedTensor::uniform(2, 128, 64, both(MOIRE_SCALING_MXFP8)).value();
  source = from;
  target = to;
  source.has_layout = target.has_layout = true;
  target.layout.block = 32;
  auto* const codes = static_cast<uint8_t*>(target.rowwise.data.data);
  std::fill(codes, codes + 2 * 128 * 64, uint8_t{0xA5});
  target.columnwise.scales.shape[2] = 63;
  EXPECT_FALSE(convert_glu(cpu(), source, target).ok());
  EXPECT_TRUE(std::all_of(codes, codes + 2 * 128 * 64, [](uint8_t c) { return c == 0xA5; }));
}

// Permuting codes and scales is quantising the permuted weight.
TEST(GroupedTensor, ConvertGluIsQuantizingTheConvertedWeight) {
  Random random;
  const auto test = [&](int32_t scaling, const GluLayout& from, const GluLayout& to) {
    TestWeight w(DType::kBF16, 2, 2 * 256, 40);
    w.randomize(random);
    TestTensor converted(DType::kBF16, {2, 2 * 256, 40});
    ConvertGluArgs args;
    args.source = moire_weight(w).tensor;
    args.target = converted;
    args.dim = 1;
    args.from = from;
    args.to = to;
    ASSERT_TRUE(succeeds(convert_glu(cpu(), args)));
    GroupedTensor source = GroupedTensor::uniform(2, 512, 40, both(scaling)).value();
    GroupedTensor target = GroupedTensor::uniform(2, 512, 40, both(scaling)).value();
    GroupedTensor want = GroupedTensor::uniform(2, 512, 40, both(scaling)).value();
    source.set_layout(from);
    target.set_layout(to);
    ASSERT_TRUE(succeeds(quantize(cpu(), Weight(w), source)));
    ASSERT_TRUE(succeeds(quantize(cpu(), converted.view(), want)));
    ASSERT_TRUE(succeeds(convert_glu(cpu(), source, target)));
    expect_same(target, want);
  };
  test(MOIRE_SCALING_MXFP8, GluLayout::halves(), GluLayout::interleaved(32));
  test(MOIRE_SCALING_MXFP8, GluLayout::interleaved(64, MOIRE_UP_FIRST), GluLayout::halves());
  test(MOIRE_SCALING_FP8_BLOCK, GluLayout::halves(), GluLayout::interleaved(128));
  test(MOIRE_SCALING_FP8_TILE, GluLayout::interleaved(128), GluLayout::halves());

  GroupedTensor source = GroupedTensor::uniform(2, 512, 40, both(MOIRE_SCALING_MXFP8)).value();
  const GroupedTensor target =
      GroupedTensor::uniform(2, 512, 40, both(MOIRE_SCALING_MXFP8)).value();
  EXPECT_TRUE(fails(convert_glu(cpu(), source, target), Code::kInvalidArgument,
                    "source has no layout, needs one on both sides"));
  source.set_layout(GluLayout::interleaved(8));
  GroupedTensorView halves = target;
  halves.has_layout = true;
  EXPECT_TRUE(fails(convert_glu(cpu(), source, halves), Code::kInvalidArgument,
                    "gate and up lie in blocks of 8 rows, needs a multiple of 32"));
}

TEST(GroupedTensor, RefusesWhatHasNoSuchForm) {
  GroupedTensorOptions tiles = both(MOIRE_SCALING_FP8_TILE);
  EXPECT_TRUE(fails(GroupedTensor::ragged(Groups(), 8, tiles).status(), Code::kInvalidArgument,
                    "tiles are of uniform batches"));
  tiles.columnwise = true;
  EXPECT_TRUE(fails(GroupedTensor::uniform(1, 8, 8, tiles).status(), Code::kInvalidArgument,
                    "tiles serve both directions"));
  GroupedTensorOptions none;
  none.rowwise = false;
  EXPECT_TRUE(fails(GroupedTensor::uniform(1, 8, 8, none).status(), Code::kInvalidArgument,
                    "neither rowwise nor columnwise is asked for"));
  GroupedTensorOptions bf16;
  bf16.element = DType::kBF16;
  EXPECT_TRUE(fails(GroupedTensor::uniform(1, 8, 8, bf16).status(), Code::kInvalidArgument,
                    "element is bf16, needs e4m3 or e5m2"));
  EXPECT_TRUE(fails(GroupedTensor::uniform(-1, 8, 8).status(), Code::kInvalidArgument,
                    "sizes must not be negative"));
  EXPECT_TRUE(fails(GroupedTensor::uniform(1 << 20, 1 << 30, 1 << 30).status(),
                    Code::kInvalidArgument, "its size in bytes exceeds 63 bits"));
  EXPECT_TRUE(fails(QuantizedWeight::create(1, 8, 8, MOIRE_SCALING_FP8_BLOCK).status(),
                    Code::kInvalidArgument, "scaling is FP8_BLOCK (2), needs MXFP8 (1)"));
  const GroupedTensor t = GroupedTensor::uniform(2, 8, 8).value();
  GroupedTensorView other = t;
  other.scaling = MOIRE_SCALING_FP8_BLOCK;
  EXPECT_TRUE(fails(requantize(cpu(), t, other), Code::kInvalidArgument,
                    "source is MXFP8 (1), target FP8_BLOCK (2), must be alike"));
  const TestWeight wrong(DType::kBF16, 2, 8, 9);
  EXPECT_TRUE(fails(quantize(cpu(), Weight(wrong), t), Code::kInvalidArgument,
                    "source is bf16 [2, 8, 9], needs the shape of the target, e4m3 [2, 8, 8]"));
}

// Scales of a batch that says so are those of the op with fractional_scales, weights' copies too.
TEST(GroupedTensor, TakesFractionalScales) {
  Random random;
  const Batch batch({"Three", {40, 0, 93}, 2});
  TestTensor x(DType::kBF16, {batch.capacity(), 64});
  x.randomize(random);
  GroupedTensorOptions options = both(MOIRE_SCALING_FP8_BLOCK);
  const GroupedTensor whole = GroupedTensor::ragged(batch.groups(), 64, options).value();
  options.fractional_scales = true;
  const GroupedTensor got = GroupedTensor::ragged(batch.groups(), 64, options).value();
  const GroupedTensor want = GroupedTensor::ragged(batch.groups(), 64, options).value();
  for (const GroupedTensor* t : {&whole, &got}) ASSERT_TRUE(succeeds(quantize(cpu(), x, *t)));
  QuantizeArgs args;
  args.source = x;
  args.scaling = MOIRE_SCALING_FP8_BLOCK;
  args.fractional_scales = 1;
  args.rowwise = want.view().rowwise;
  args.columnwise = want.view().columnwise;
  args.groups = batch.groups();
  ASSERT_TRUE(succeeds(quantize(cpu(), args)));
  expect_same(got, want);
  EXPECT_FALSE(same_bits(got.view().rowwise.scales, whole.view().rowwise.scales));

  TestWeight w(DType::kFP32, 2, 64, 40);
  w.randomize(random);
  QuantizedWeight kept = QuantizedWeight::create(2, 64, 40, MOIRE_SCALING_FP8_TILE, true).value();
  ASSERT_TRUE(succeeds(kept.update(cpu(), Weight(w), 1)));
  GroupedTensorOptions tiles = both(MOIRE_SCALING_FP8_TILE);
  const GroupedTensor powers = GroupedTensor::uniform(2, 64, 40, tiles).value();
  tiles.fractional_scales = true;
  const GroupedTensor fractions = GroupedTensor::uniform(2, 64, 40, tiles).value();
  for (const GroupedTensor* t : {&powers, &fractions}) {
    ASSERT_TRUE(succeeds(quantize(cpu(), Weight(w), *t)));
  }
  expect_same(kept.view(), fractions);
  EXPECT_FALSE(same_bits(kept.view().rowwise.scales, powers.view().rowwise.scales));

  GroupedTensorOptions mx = both(MOIRE_SCALING_MXFP8);
  mx.fractional_scales = true;
  EXPECT_TRUE(fails(GroupedTensor::uniform(2, 64, 40, mx).status(), Code::kInvalidArgument,
                    "fractional_scales is set, but the scales of MXFP8 are powers of two"));
}

// A new version is quantised into the same memory; an old one is not looked at.
TEST(QuantizedWeight, FollowsVersionsAtFixedAddresses) {
  Random random;
  TestWeight w(DType::kFP32, 2, 64, 40);
  w.randomize(random);
  QuantizedWeight cache =
      std::move(QuantizedWeight::create(2, 64, 40, MOIRE_SCALING_MXFP8)).value();
  const void* const address = cache.for_forward(MOIRE_OUT_IN).data.data;
  ASSERT_TRUE(succeeds(cache.update(cpu(), Weight(w), 7)));
  const GroupedTensor first = GroupedTensor::uniform(2, 64, 40, both(MOIRE_SCALING_MXFP8)).value();
  ASSERT_TRUE(succeeds(quantize(cpu(), Weight(w), first)));
  expect_same(cache.view(), first);
  w.randomize(random);
  ASSERT_TRUE(succeeds(cache.update(cpu(), Weight(w), 7)));
  expect_same(cache.view(), first);
  ASSERT_TRUE(succeeds(cache.update(cpu(), Weight(w), 8)));
  EXPECT_FALSE(same_bits(cache.view().rowwise.data, first.view().rowwise.data));
  ASSERT_TRUE(succeeds(quantize(cpu(), Weight(w), first)));
  expect_same(cache.view(), first);
  EXPECT_EQ(cache.for_forward(MOIRE_OUT_IN).data.data, address);
  EXPECT_EQ(cache.for_dgrad(MOIRE_IN_OUT).data.data, address);
  EXPECT_NE(cache.for_dgrad(MOIRE_OUT_IN).data.data, address);
}

}  // namespace
}  // namespace moire::test
