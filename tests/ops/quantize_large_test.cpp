// Tensors so large that they are written past the cache.
#include <gtest/gtest.h>
#include <moire/quantize.h>

#include "tests/ops/quantize_support.h"

namespace moire::test {
namespace {

// Both directions of normal numbers, 2048 columns wide: a part of the rows against the reference.
void expect_large_copies(DType dtype, int32_t scaling, bool fractional) {
  constexpr int64_t kColumns = 2048;
  const int64_t block = scale_block(scaling), num_blocks = 4160 / block, rows = num_blocks * block;
  const auto bytes = static_cast<size_t>(rows * kColumns);
  ASSERT_GE(bytes, size_t{8} << 20);
  Random random;
  TestTensor source(dtype, {rows, kColumns});
  source.randomize(random);
  for (int64_t c = 0; c < kColumns; c += 97) source.set(rows - 1, c, 1e-4);
  const TestWorkspace along(bytes), down(bytes);  // aligned, unlike test tensors
  const TensorView rowwise(along.get().data, DType::kE4M3, {rows, kColumns});
  const TensorView columnwise(down.get().data, DType::kE5M2, {rows, kColumns});
  const TestTensor row_scales(scale_dtype(scaling), {rows, kColumns / block});
  const TestTensor column_scales(scale_dtype(scaling), {num_blocks + 1, kColumns});
  QuantizeArgs args;
  args.source = source;
  args.scaling = scaling;
  args.fractional_scales = fractional ? 1 : 0;
  args.rowwise = Quantized(rowwise, row_scales);
  args.columnwise = Quantized(columnwise, column_scales);
  ASSERT_TRUE(succeeds(quantize(cpu(2), args)));
  for (const int64_t b : {int64_t{0}, random.integer(1, num_blocks - 2), num_blocks - 1}) {
    const int64_t first = block * b;
    QuantizeArgs part = args;
    part.source = source.view().slice(first, block);
    part.rowwise = Quantized(rowwise.slice(first, block), row_scales.view().slice(first, block));
    part.columnwise = Quantized(columnwise.slice(first, block), column_scales.view().slice(b, 2));
    const reference::QuantizeResults want = reference::quantize(part);
    EXPECT_TRUE(same_bytes(part.rowwise.data, want.rowwise.data, MOIRE_TAIL_ZERO)) << b;
    EXPECT_TRUE(same_bytes(part.rowwise.scales, want.rowwise.scales, MOIRE_TAIL_ZERO)) << b;
    EXPECT_TRUE(same_bytes(part.columnwise.data, want.columnwise.data, MOIRE_TAIL_ZERO)) << b;
  }
  EXPECT_TRUE(along.is_undamaged());
  EXPECT_TRUE(down.is_undamaged());
}

TEST(LargeCopies, QuantizedCopiesThatBypassTheCacheHoldTheBytesOfTheReference) {
  for (const DType dtype : {DType::kBF16, DType::kFP16, DType::kFP32}) {
    SCOPED_TRACE(dtype_name(dtype));
    expect_large_copies(dtype, MOIRE_SCALING_MXFP8, false);
    if (dtype != DType::kFP16) expect_large_copies(dtype, MOIRE_SCALING_FP8_BLOCK, true);
  }
}

// Any codes and any scales, decoded: a part of the rows against the reference.
void expect_large_decoded(int32_t scaling, int32_t direction, DType dtype) {
  constexpr int64_t kRows = 4096, kColumns = 2112;
  const int64_t block = scale_block(scaling);
  const Groups one(nullptr, 1, kRows);
  Random random;
  const TestCopy source(DType::kE4M3, scaling, direction, one, kColumns);
  fill_all(source, random);
  const auto element = static_cast<size_t>(dtype_size(dtype));
  const TestWorkspace memory(kRows * kColumns * element);
  const TensorView target(memory.get().data, dtype, {kRows, kColumns});
  DequantizeArgs args;
  args.source = source;
  args.scaling = scaling;
  args.direction = direction;
  args.target = target;
  ASSERT_TRUE(succeeds(dequantize(cpu(2), args)));
  for (const int64_t b : {int64_t{0}, random.integer(1, kRows / block - 1)}) {
    DequantizeArgs part = args;
    part.source.data = source.data.view().slice(b * block, block);
    part.source.scales = direction == MOIRE_ROWWISE ? source.scales.view().slice(b * block, block)
                                                    : source.scales.view().slice(b, 2);
    part.target = target.slice(b * block, block);
    EXPECT_TRUE(matches(part.target, reference::dequantize(part))) << b;
  }
  EXPECT_TRUE(memory.is_undamaged());
}

TEST(LargeCopies, DequantizedTargetsThatBypassTheCacheHoldDataTimesScale) {
  for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    SCOPED_TRACE(dtype_name(dtype));
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      expect_large_decoded(MOIRE_SCALING_MXFP8, direction, dtype);
      expect_large_decoded(MOIRE_SCALING_FP8_BLOCK, direction, dtype);
    }
  }
}

}  // namespace
}  // namespace moire::test
