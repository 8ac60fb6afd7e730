// What the FP8 ops say of bad calls, and that they leave outputs untouched.
#include <gtest/gtest.h>
#include <moire/quantize.h>

#include "tests/ops/quantize_support.h"
#include "tests/support/ragged.h"

namespace moire::test {
namespace {

constexpr int64_t kColumns = 96;

class QuantizeErrors : public testing::Test {
 protected:
  QuantizeErrors() { reset(); }

  void reset() {
    args = {};
    args.source = source;
    args.scaling = MOIRE_SCALING_MXFP8;
    args.rowwise = rowwise;
    args.columnwise = columnwise;
    args.groups = batch.groups();
  }
  void expect(const std::string& text) {
    EXPECT_TRUE(fails(quantize(cpu(), args), Code::kInvalidArgument, "quantize: " + text));
    const TestCopy poisoned_rows(DType::kE4M3, MOIRE_SCALING_MXFP8, MOIRE_ROWWISE, batch.groups(),
                                 kColumns);
    EXPECT_TRUE(same_bits(rowwise.scales, poisoned_rows.scales));
    EXPECT_TRUE(same_bits(rowwise.data, poisoned_rows.data));
    EXPECT_TRUE(same_bits(columnwise.data, poisoned_rows.data));
    reset();
  }

  Batch batch{{2, 3}, 1};
  TestTensor source{DType::kBF16, {6, kColumns}};
  TestCopy rowwise{DType::kE4M3, MOIRE_SCALING_MXFP8, MOIRE_ROWWISE, batch.groups(), kColumns};
  TestCopy columnwise{DType::kE4M3, MOIRE_SCALING_MXFP8, MOIRE_COLUMNWISE, batch.groups(),
                      kColumns};
  QuantizeArgs args;
};

TEST_F(QuantizeErrors, NameScalesAndWhatTheyHaveToBe) {
  const TestTensor narrow(DType::kE8M0, {6, 2}), bytes(DType::kUint8, {6, 3});
  const TestTensor floats(DType::kFP32, {6, 3});
  args.rowwise.scales = narrow;
  expect("rowwise.scales is e8m0 [6, 2], needs [capacity, ceil(k / 32)] = [6, 3]");
  args.columnwise.scales = narrow;
  expect("columnwise.scales is e8m0 [6, 2], needs [capacity / 32 + G, k] = [2, 96]");
  args.rowwise.scales = bytes;
  expect("rowwise.scales is uint8 [6, 3], needs e8m0: scaling is MXFP8 (1)");
  args.rowwise.scales = floats;
  expect("rowwise.scales is fp32 [6, 3], needs e8m0: scaling is MXFP8 (1)");
  args.scaling = MOIRE_SCALING_FP8_BLOCK;
  expect("rowwise.scales is e8m0 [6, 3], needs fp32: scaling is FP8_BLOCK (2)");
  args.rowwise.scales = {};
  expect("rowwise.scales is absent, needs e8m0");
  args.rowwise.data = {};
  expect("rowwise.data is absent, needs e4m3 or e5m2 [capacity, k] = [6, 96]");
  args.columnwise.scales = rowwise.scales;
  expect(
      "columnwise.scales is e8m0 [6, 3], which is the shape of rowwise scales; this call needs "
      "columnwise ones, [capacity / 32 + G, k] = [2, 96]");
  args.rowwise.scales = columnwise.scales;
  expect(
      "rowwise.scales is e8m0 [2, 96], which is the shape of columnwise scales; this call needs "
      "rowwise ones, [capacity, ceil(k / 32)] = [6, 3]");
}

TEST_F(QuantizeErrors, NameDataSourceAndScaling) {
  const TestTensor short_data(DType::kE4M3, {5, kColumns}), words(DType::kFP16, {6, kColumns});
  const TestTensor ints(DType::kInt32, {6, kColumns});
  args.rowwise.data = short_data;
  expect("rowwise.data is e4m3 [5, 96], needs [capacity, k] = [6, 96]");
  args.columnwise.data = words;
  expect("columnwise.data is fp16 [6, 96], needs e4m3 or e5m2");
  args.source = ints;
  expect("source is int32 [6, 96], needs fp32, bf16 or fp16");
  args.source = {};
  expect("source is absent");
  args.rowwise = {};
  args.columnwise = {};
  expect("rowwise and columnwise are both absent, needs at least one output");
  args.scaling = MOIRE_SCALING_FP8_TILE;
  expect("scaling is FP8_TILE (3), must be MXFP8 (1) or FP8_BLOCK (2)");
  args.scaling = 0;
  expect("scaling is NONE (0), must be MXFP8 (1) or FP8_BLOCK (2)");
  args.scaling = 9;
  expect("scaling is 9, must be");
  args.fractional_scales = 1;
  expect("fractional_scales is 1, but the scales of MXFP8 are powers of two");
  args.fractional_scales = 2;
  expect("fractional_scales is 2 (folded), needs a ragged copy, on a GPU");
  args.fractional_scales = 3;
  expect("fractional_scales is 3, must be 0 to 2");
  args.tail = 2;
  expect("tail is 2, must be 0 to 1");
  batch.offsets()[1] = 7;
  expect("group 0 ends at row 7, past the capacity 6");
}

TEST_F(QuantizeErrors, NameValuesOfAnotherScalingOrOnACpu) {
  const TestTensor values(DType::kBF16, {6, kColumns}), low(DType::kBF16, {5, kColumns});
  args.rowwise.data = low;
  args.rowwise.scales = {};
  expect("rowwise.data is bf16 [5, 96], needs [capacity, k] = [6, 96]");
  for (const int32_t scaling : {MOIRE_SCALING_FP8_BLOCK, MOIRE_SCALING_MXFP8}) {
    args.columnwise = Quantized(values, {});
    args.rowwise = {};
    args.scaling = scaling;
    expect(
        "columnwise.data is bf16, needs e4m3 or e5m2: GPUs make values, in MXFP8, without scales");
  }
}

TEST_F(QuantizeErrors, NameACopyThatLiesTransposedOnACpu) {
  const int64_t rows = transposed_rows(args.groups.capacity, args.groups.num_groups);
  const TestTensor transposed(DType::kE4M3, {kColumns, rows});
  const TestTensor scales(DType::kFP32, {rows / 128, kColumns});
  for (const int32_t scaling : {MOIRE_SCALING_FP8_BLOCK, MOIRE_SCALING_MXFP8}) {
    args.scaling = scaling;
    args.rowwise = {};
    args.columnwise = Quantized(transposed, scales);
    const std::string found = concat("columnwise.data is e4m3 [96, ", rows, "], ");
    expect(found + (scaling == MOIRE_SCALING_FP8_BLOCK
                        ? "which is transposed: needs contiguous rows, on a GPU"
                        : "needs [capacity, k] = [6, 96]"));
  }
}

TEST_F(QuantizeErrors, NameABiasGradientOfOtherSizesOrWithoutGroupsAndScratchThatIsTooSmall) {
  const TestTensor sums(DType::kFP32, {2, kColumns}), other(DType::kFP32, {3, kColumns});
  args.grad_bias = other;
  expect("grad_bias is fp32 [3, 96], needs [G, k] = [2, 96]");
  args.grad_bias = sums;
  args.columnwise = {};
  args.groups = {};
  expect("grad_bias is present but groups are absent, needs groups, whose rows are summed");
  args.grad_bias = sums;
  const std::vector<uint8_t> betas = {0, 2};
  args.beta_per_group = betas.data();
  expect("beta_per_group[1] is 2, must be 0 or 1");
  args.grad_bias = sums;
  EXPECT_TRUE(fails(quantize(cpu(), args), Code::kOutOfMemory, "quantize: the workspace has 0"));
}

TEST_F(QuantizeErrors, DoNotLookForBetasOfGroupsThatThereAreNot) {
  const std::vector<uint8_t> past_the_betas = {2};
  args.beta_per_group = past_the_betas.data();
  args.groups = {};
  args.columnwise = {};
  EXPECT_TRUE(succeeds(quantize(cpu(), args)));
}

TEST_F(QuantizeErrors, NameRowIdxAndPointers) {
  const TestTensor row_idx = index_tensor(DType::kInt32, {0, 1, 6, 2, 3, -1});
  args.row_idx = row_idx;
  expect("row_idx[2] is 6, must be 0 to 5");
  args.row_idx = source;
  expect("row_idx is bf16 [6, 96], needs");
  args.columnwise.data = rowwise.data;
  expect("columnwise.data and rowwise.data overlap in their address ranges, must be apart");
  args.rowwise.scales = {rowwise.data.view().data, MOIRE_E8M0, 2, {6, 3}, 0};
  expect("rowwise.scales and rowwise.data overlap in their address ranges, must be apart");
  args.rowwise.data = {source.view().data, MOIRE_E4M3, 2, {6, kColumns}, 0};
  expect("rowwise.data and source overlap in their address ranges, must be apart");
  args.rowwise.data.data = nullptr;
  expect("rowwise.data is e4m3 [6, 96] but its data pointer is null");
  args.source.data = static_cast<char*>(args.source.data) + 1;
  expect("source is bf16 [6, 96] but its data pointer is not aligned to its 2-byte elements");
  args.scaling = MOIRE_SCALING_FP8_BLOCK;
  const TestTensor floats(DType::kFP32, {6, 1});
  args.columnwise = {};
  args.rowwise.scales = floats;
  args.rowwise.scales.data = static_cast<char*>(args.rowwise.scales.data) + 2;
  expect(
      "rowwise.scales is fp32 [6, 1] but its data pointer is not aligned to its 4-byte elements");
}

class WeightErrors : public testing::Test {
 protected:
  WeightErrors() { reset(); }
  void reset() {
    args = {};
    args.source = source;
    args.scaling = MOIRE_SCALING_FP8_TILE;
    args.rowwise = tiles;
  }
  void expect(const std::string& text) {
    EXPECT_TRUE(
        fails(quantize_weight(cpu(), args), Code::kInvalidArgument, "quantize_weight: " + text));
    reset();
  }
  TestWeight source{DType::kBF16, 2, 130, 64};
  TestCopy tiles{DType::kE4M3, MOIRE_SCALING_FP8_TILE, MOIRE_ROWWISE, 2, 130, 64};
  TestCopy rows{DType::kE4M3, MOIRE_SCALING_MXFP8, MOIRE_ROWWISE, 2, 130, 64};
  TestCopy columns{DType::kE4M3, MOIRE_SCALING_MXFP8, MOIRE_COLUMNWISE, 2, 130, 64};
  QuantizeWeightArgs args;
};

TEST_F(WeightErrors, NameTilesShapesAndLists) {
  args.columnwise = tiles;
  expect(
      "columnwise is present, but one copy in tiles serves both directions: needs rowwise alone");
  args.columnwise.scales = tiles.scales;
  expect(
      "columnwise is present, but one copy in tiles serves both directions: needs rowwise alone");
  args.scaling = MOIRE_SCALING_MXFP8;
  args.rowwise = rows;
  args.columnwise.scales = columns.scales;
  expect("columnwise.data is absent, needs e4m3 or e5m2 [G, out, in] = [2, 130, 64]");
  args.rowwise.scales = rows.scales;
  expect("rowwise.scales is e8m0 [2, 130, 2], needs fp32: scaling is FP8_TILE (3)");
  args.scaling = MOIRE_SCALING_MXFP8;
  args.rowwise = rows;
  args.rowwise.scales = columns.scales;
  expect(
      "rowwise.scales is e8m0 [2, 5, 64], which is the shape of columnwise scales; this call "
      "needs rowwise ones, [G, out, ceil(in / 32)] = [2, 130, 2]");
  args.source.tensor.rank = 2;
  expect("source has rank 2, needs rank 3 [G, n, k]");
  args.source = {};
  expect("source is absent, needs fp32, bf16 or fp16 [G, n, k]");
  args.source.layout = 5;
  expect("source.layout is 5, must be 0 to 1");
  const void* list[] = {source.view().tensor.data, tiles.data.view().data};
  args.source.tensor.data = nullptr;
  args.source.list = list;
  expect("rowwise.data and source[1] overlap in their address ranges, must be apart");
}

TEST(DecodeErrors, NameShapesScalingAndGroups) {
  const Batch batch({2, 3}, 1);
  const TestCopy ragged(DType::kE4M3, MOIRE_SCALING_MXFP8, MOIRE_ROWWISE, batch.groups(), 64);
  const TestCopy weights(DType::kE4M3, MOIRE_SCALING_MXFP8, MOIRE_ROWWISE, 2, 40, 64);
  const TestTensor target(DType::kFP32, {6, 64}), narrow(DType::kFP32, {6, 63});
  DequantizeArgs args;
  const auto expect = [&](const std::string& text) {
    EXPECT_TRUE(fails(dequantize(cpu(), args), Code::kInvalidArgument, "dequantize: " + text));
    args = {};
    args.source = ragged;
    args.scaling = MOIRE_SCALING_MXFP8;
    args.target = target;
    args.groups = batch.groups();
  };
  expect("scaling is NONE (0), must be MXFP8 (1), FP8_BLOCK (2) or FP8_TILE (3)");
  args.scaling = MOIRE_SCALING_FP8_TILE;
  expect("scaling is FP8_TILE (3) but source.data is e4m3 [6, 64]: tiles are of weights [G, n, k]");
  args.direction = 2;
  expect("direction is 2, must be 0 to 1");
  args.direction = MOIRE_COLUMNWISE;
  expect(
      "source.scales is e8m0 [6, 2], which is the shape of rowwise scales; this call needs "
      "columnwise ones, [capacity / 32 + G, k] = [2, 64]");
  args.target = narrow;
  expect("target is fp32 [6, 63] but source.data is e4m3 [6, 64]: the shapes must be equal");
  args.source = weights;
  expect(
      "groups are given but source.data is e4m3 [2, 40, 64]: only a ragged [capacity, k] has "
      "them");
  args.groups.capacity = 7;
  expect("groups.capacity is 7 but source.data is e4m3 [6, 64]");
  args.source = {};
  expect("source.data is absent, needs e4m3 or e5m2 of rank 2 or 3");
  args.target = {ragged.data.view().data, MOIRE_FP32, 2, {6, 64}, 0};
  expect("target and source.data overlap in their address ranges, must be apart");

  RequantizeArgs again;
  again.source = ragged;
  again.target = ragged;
  again.scaling = MOIRE_SCALING_FP8_TILE;
  EXPECT_TRUE(fails(requantize(cpu(), again), Code::kInvalidArgument,
                    "requantize: scaling is FP8_TILE (3), must be MXFP8 (1) or FP8_BLOCK (2): a "
                    "tile is the same in both directions"));
  again.scaling = MOIRE_SCALING_MXFP8;
  again.groups = batch.groups();
  EXPECT_TRUE(fails(requantize(cpu(), again), Code::kInvalidArgument,
                    "requantize: target.scales is e8m0 [6, 2], which is the shape of rowwise"));
}

TEST(ScaleErrors, NameLayoutsAndSizes) {
  const Batch batch({2, 3}, 1);
  const TestCopy copy(DType::kE4M3, MOIRE_SCALING_MXFP8, MOIRE_ROWWISE, batch.groups(), 64);
  const TestTensor there(DType::kE8M0, {256, 4}), few(DType::kE8M0, {255, 4});
  const TestTensor padded(DType::kE8M0, {256, 4}, 1), wide(DType::kE8M0, {256, 8});
  ConvertScalesArgs args;
  const auto reset = [&] {
    args = {};
    args.source = copy.scales;
    args.target = there;
    args.to = MOIRE_SCALES_SWIZZLED;
    args.k = 64;
    args.groups = batch.groups();
  };
  const auto expect = [&](const std::string& text) {
    EXPECT_TRUE(
        fails(convert_scales(cpu(), args), Code::kInvalidArgument, "convert_scales: " + text));
    EXPECT_TRUE(same_bits(there, TestTensor(DType::kE8M0, {256, 4})));
    reset();
  };
  reset();
  args.from = MOIRE_SCALES_DENSE;
  expect("from is 1 and to is 3: one of them must be canonical (0)");
  args.to = 4;
  expect("to is 4, must be 0 to 3");
  args.target = few;
  expect("target is e8m0 [255, 4], needs at least 256 rows for these groups (swizzled)");
  args.target = wide;
  expect("target is e8m0 [256, 8], needs 4 columns (swizzled, k = 64)");
  args.target = padded;
  expect("target is e8m0 [256, 4] with row stride 5, needs contiguous rows");
  args.k = -1;
  expect("k is -1, must be 0 to 2^40");
  args.k = 65;
  expect("source is e8m0 [6, 2], needs [capacity, ceil(k / 32)] = [6, 3]");
  args.direction = MOIRE_COLUMNWISE;
  expect("source is e8m0 [6, 2], which is the shape of rowwise scales");
  int64_t shape[2];
  const auto shape_fails = [&](int32_t scaling, int32_t direction, int32_t layout, int64_t rows,
                               int64_t* out, const std::string& text) {
    EXPECT_TRUE(fails(scales_shape(scaling, direction, layout, rows, 64, 1, out),
                      Code::kInvalidArgument, "scales_shape: " + text));
  };
  shape_fails(0, 0, 0, 1, shape, "scaling is NONE (0), must be MXFP8 (1)");
  shape_fails(1, 2, 0, 1, shape, "direction is 2, must be 0 or 1");
  shape_fails(1, 0, 4, 1, shape, "layout is 4, must be 0 to 3");
  shape_fails(2, 0, 2, 1, shape, "layout is padded, but FP8_BLOCK (2) has the canonical one only");
  shape_fails(1, 0, 0, -1, shape, "rows, k and num_groups are -1, 64 and 1, must be 0 to 2^40");
  shape_fails(1, 0, 0, INT64_MAX, shape,
              "rows, k and num_groups are 9223372036854775807, 64 and 1, must be 0 to 2^40");
  shape_fails(1, 0, 0, 1, nullptr, "shape is null");
}

}  // namespace
}  // namespace moire::test
