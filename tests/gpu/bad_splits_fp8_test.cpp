// The same of the ops on 8 bits (bad_splits_test.cpp).
#include <numeric>
#include <utility>
#include <vector>

#include "tests/gpu/bad_splits.h"
#include "tests/gpu/quantize_call.h"

namespace moire::test {
namespace {

// Quantised in both directions, to the other one, decoded, and the scales in another layout.
TEST_F(BadSplits, OfTheOpsOn8BitsAreReported) {
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    Random random;
    QuantizeCall call(DType::kBF16, DType::kE4M3, scaling, batch.groups(), 264);
    call.source.randomize(random);
    QuantizeArgs& quantized = call.args;
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
    const TestTensor decoded(DType::kFP32, {25, 264});
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      const int32_t to = direction == MOIRE_ROWWISE ? MOIRE_COLUMNWISE : MOIRE_ROWWISE;
      const TestCopy again(DType::kE4M3, scaling, to, batch.groups(), 264);
      const RequantizeArgs other = call.requantized(direction, again);
      expect_reported(batch, "requantize", [&] { return requantize(alone(), other); });
      const DequantizeArgs plain = call.dequantized(direction, decoded);
      expect_reported(batch, "dequantize", [&] { return dequantize(alone(), plain); });
      EXPECT_TRUE(again.data.is_undamaged() && again.scales.is_undamaged());
    }
    for (const TestCopy* c : {&call.rowwise, &call.columnwise}) {
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
