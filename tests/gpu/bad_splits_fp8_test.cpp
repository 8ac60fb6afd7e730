// The same of the ops on 8 bits (bad_splits_test.cpp).
#include <numeric>
#include <utility>
#include <vector>

#include "tests/gpu/bad_splits.h"
#include "tests/ops/quantize_support.h"

namespace moire::test {
namespace {

// Quantised in both directions, to the other one, decoded, and the scales in another layout.
TEST_F(BadSplits, OfTheOpsOn8BitsAreReported) {
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    Random random;
    TestTensor x(DType::kBF16, {25, 264}), decoded(DType::kFP32, {25, 264});
    x.randomize(random);
    const auto copy = [&](int32_t direction) {
      return TestCopy(DType::kE4M3, scaling, direction, batch.groups(), 264);
    };
    const TestCopy rows = copy(MOIRE_ROWWISE), columns = copy(MOIRE_COLUMNWISE);
    QuantizeArgs quantized;
    quantized.source = x;
    quantized.scaling = scaling;
    quantized.rowwise = rows;
    quantized.columnwise = columns;
    quantized.groups = batch.groups();
    expect_reported(batch, "quantize", [&] { return quantize(alone(), quantized); });
    const TestTensor sums(DType::kFP32, {3, 264});
    quantized.grad_bias = sums;
    expect_reported(batch, "quantize", [&] { return run(alone(), quantized); });
    std::vector<int64_t> order(25);
    std::iota(order.rbegin(), order.rend(), 0);
    const TestTensor row_idx = index_tensor(DType::kInt32, order);
    quantized.grad_bias = {};
    quantized.row_idx = row_idx;
    expect_reported(batch, "quantize", [&] { return quantize(alone(), quantized); });
    EXPECT_TRUE(sums.is_undamaged());
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      const bool from_rows = direction == MOIRE_ROWWISE;
      const TestCopy& source = from_rows ? rows : columns;
      const TestCopy again = copy(from_rows ? MOIRE_COLUMNWISE : MOIRE_ROWWISE);
      RequantizeArgs other;
      other.source = source;
      other.scaling = scaling;
      other.direction = direction;
      other.target = again;
      other.groups = batch.groups();
      expect_reported(batch, "requantize", [&] { return requantize(alone(), other); });
      DequantizeArgs plain;
      plain.source = source;
      plain.scaling = scaling;
      plain.direction = direction;
      plain.target = decoded;
      plain.groups = batch.groups();
      expect_reported(batch, "dequantize", [&] { return dequantize(alone(), plain); });
      EXPECT_TRUE(again.data.is_undamaged() && again.scales.is_undamaged());
    }
    for (const TestCopy* c : {&rows, &columns}) {
      EXPECT_TRUE(c->data.is_undamaged() && c->scales.is_undamaged());
    }
    EXPECT_TRUE(decoded.is_undamaged());
  }
}

TEST_F(BadSplits, OfConvertScalesAreReported) {
  for (const int32_t layout : {MOIRE_SCALES_DENSE, MOIRE_SCALES_PADDED, MOIRE_SCALES_SWIZZLED}) {
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      const TestCopy copy(DType::kE4M3, MOIRE_SCALING_MXFP8, direction, batch.groups(), 264);
      int64_t shape[2];
      ASSERT_TRUE(
          succeeds(scales_shape(MOIRE_SCALING_MXFP8, direction, layout, 25, 264, 3, shape)));
      TestTensor target(DType::kE8M0, {shape[0], shape[1]});
      ConvertScalesArgs args;
      args.source = copy.scales;
      args.target = target;
      args.to = layout;
      args.direction = direction;
      args.k = 264;
      args.groups = batch.groups();
      expect_reported(batch, "convert_scales", [&] { return convert_scales(alone(), args); });
      std::swap(args.source, args.target);
      std::swap(args.from, args.to);
      expect_reported(batch, "convert_scales", [&] { return convert_scales(alone(), args); });
      EXPECT_TRUE(target.is_undamaged() && copy.scales.is_undamaged());
    }
  }
}

}  // namespace
}  // namespace moire::test
