// The reference's quantisation against what a page of paper gives.
#include "reference/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "reference/float_format.h"
#include "reference/fp8.h"
#include "tests/support/ragged.h"
#include "tests/support/tensors.h"

namespace moire::test {
namespace {

TEST(ReferenceFp8, EncodesToTheNearestOfAllCodes) {
  Random random;
  for (const DType dtype : {DType::kE4M3, DType::kE5M2}) {
    const uint64_t most = dtype == DType::kE4M3 ? 0x7E : 0x7B;
    for (int i = 0; i < 3000; ++i) {
      const double x = std::ldexp(random.normal(), static_cast<int>(random.integer(-20, 12)));
      const double got = reference::decode(dtype, reference::encode_fp8(dtype, x));
      double least = 1e300;
      for (uint64_t code = 0; code <= most; ++code) {
        least = std::min(least, std::fabs(std::fabs(x) - reference::decode(dtype, code)));
      }
      ASSERT_EQ(std::fabs(std::fabs(x) - std::fabs(got)), least) << x;
      ASSERT_EQ(std::signbit(got), std::signbit(x)) << x;
    }
  }
  EXPECT_EQ(reference::encode_fp8(DType::kE4M3, 17), 0x58);  // halfway from 16 to 18: to 16, even
  EXPECT_EQ(reference::encode_fp8(DType::kE4M3, 19), 0x5A);  // halfway from 18 to 20: to 20
  EXPECT_EQ(reference::encode_fp8(DType::kE4M3, 1e9), 0x7E);
  EXPECT_EQ(reference::encode_fp8(DType::kE4M3, -std::nan("")), 0x7F);
  EXPECT_EQ(reference::max_fp8(DType::kE4M3), 448);
  EXPECT_EQ(reference::max_fp8(DType::kE5M2), 57344);
}

// 3 rows of 33 columns in two groups of 1 and 2 rows; row i holds i + 1, the last column 448.
struct Example {
  Example() {
    source.fill(1);
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t j = 0; j < 33; ++j) source.set(i, j, j == 32 ? 448 : static_cast<double>(i + 1));
    }
    args.source = source;
    args.groups = batch.groups();
  }
  Batch batch{{1, 2}, 1};
  TestTensor source{DType::kFP32, {4, 33}};
  // Their views say what to make; nothing is written to them.
  TestTensor codes{DType::kE4M3, {4, 33}};
  moire_quantize_args args{};
};

TEST(ReferenceQuantize, Mxfp8RowsByHand) {
  Example e;
  e.args.scaling = MOIRE_SCALING_MXFP8;
  e.args.rowwise.data = e.codes;
  reference::QuantizedBytes got = reference::quantize(e.args).rowwise;
  EXPECT_EQ(got.scales.row_bytes, 2);
  // 1 / 448 lies between 2^-9 and 2^-8: scale 2^-8, code of 256. 2: 2^-7, and 3: 2^-7, code of 384.
  EXPECT_EQ(got.scales.at(0, 0), 119);
  EXPECT_EQ(got.data.at(0, 0), 0x78);
  EXPECT_EQ(got.scales.at(1, 0), 120);
  EXPECT_EQ(got.data.at(1, 31), 0x78);
  EXPECT_EQ(got.scales.at(2, 0), 120);
  EXPECT_EQ(got.data.at(2, 0), 0x7C);
  EXPECT_EQ(got.scales.at(2, 1), 127);  // a block of one element
  EXPECT_EQ(got.data.at(2, 32), 0x7E);
  EXPECT_TRUE(got.data.is_owned[2] && !got.data.is_owned[3] && !got.scales.is_owned[3]);
}

TEST(ReferenceQuantize, ColumnsStartAnewAtEachGroup) {
  Example e;
  e.args.scaling = MOIRE_SCALING_FP8_BLOCK;
  e.args.columnwise.data = e.codes;
  reference::QuantizedBytes got = reference::quantize(e.args).columnwise;
  ASSERT_EQ(got.scales.rows, 2);  // 4 / 128 + 2
  const auto scale = [&](int64_t row, int64_t column) {
    float out = 0;
    std::memcpy(&out, &got.scales.at(row, 4 * column), sizeof(out));
    return out;
  };
  EXPECT_EQ(scale(0, 0), 1.0F / 256);  // 448 / 1, down to a power of two
  EXPECT_EQ(scale(1, 0), 1.0F / 128);  // 448 / 3
  EXPECT_EQ(got.data.at(1, 0), 0x78);  // 2 * 128
  EXPECT_EQ(got.data.at(2, 0), 0x7C);  // 3 * 128
  EXPECT_EQ(scale(1, 32), 1.0F);
  e.args.fractional_scales = 1;
  got = reference::quantize(e.args).columnwise;
  EXPECT_EQ(scale(1, 0), 1 / (448.0F / 3));
  EXPECT_EQ(got.data.at(2, 0), 0x7E);
}

TEST(ReferenceQuantize, TilesShareOneScaleAndDecodeWithIt) {
  TestTensor source(DType::kFP32, {1, 130, 2}), codes(DType::kE4M3, {1, 130, 2});
  source.fill(1);
  source.set(129, 1, 448);
  moire_quantize_weight_args args{};
  args.source.tensor = source;
  args.scaling = MOIRE_SCALING_FP8_TILE;
  args.rowwise.data = codes;
  reference::QuantizedBytes got = reference::quantize_weight(args).rowwise;
  EXPECT_EQ(got.scales.rows, 2);
  EXPECT_EQ(got.data.at(127, 0), 0x78);  // 256 in the tile of ones
  EXPECT_EQ(got.data.at(128, 0), 0x38);  // 1 beside 448
  EXPECT_EQ(got.data.at(129, 1), 0x7E);
  TestTensor scales(DType::kFP32, {1, 2, 1});
  std::memcpy(scales.view().data, got.scales.bytes.data(), got.scales.bytes.size());
  std::memcpy(codes.view().data, got.data.bytes.data(), got.data.bytes.size());
  moire_dequantize_args back{};
  back.source = {codes, scales};
  back.scaling = MOIRE_SCALING_FP8_TILE;
  const reference::Matrix decoded = reference::dequantize(back);
  EXPECT_EQ(decoded.at(0, 0).value, 1);
  EXPECT_EQ(decoded.at(129, 0).value, 1);
  EXPECT_EQ(decoded.at(129, 1).value, 448);
}

TEST(ReferenceScales, SwizzledTilesOfARowwiseGroupByHand) {
  // One group of 130 rows with 5 blocks each: 256 x 8, two tiles in each of two rows of tiles.
  const Batch batch({130});
  TestTensor canonical(DType::kE8M0, {130, 5}), swizzled(DType::kE8M0, {256, 8});
  for (int64_t i = 0; i < 650; ++i) canonical.as<uint8_t>()[i] = static_cast<uint8_t>(i % 251);
  moire_convert_scales_args args{};
  args.source = canonical;
  args.target = swizzled;
  args.to = MOIRE_SCALES_SWIZZLED;
  args.k = 160;
  args.groups = batch.groups();
  const reference::ByteRows got = reference::convert_scales(args);
  const auto at = [&](int64_t row, int64_t block) { return (row * 5 + block) % 251; };
  EXPECT_EQ(got.bytes[0], at(0, 0));
  EXPECT_EQ(got.bytes[3], at(0, 3));
  EXPECT_EQ(got.bytes[4], at(32, 0));  // the next quarter of the rows
  EXPECT_EQ(got.bytes[16], at(1, 0));
  EXPECT_EQ(got.bytes[512], at(0, 4));  // the next tile, of one block and three of padding
  EXPECT_EQ(got.bytes[513], 0);
  EXPECT_EQ(got.bytes[1024 + 16], at(129, 0));  // the next row of tiles
  EXPECT_EQ(got.bytes[1024 + 32], 0);
}

TEST(ReferenceScales, PaddedColumnwiseGroupsAreTransposed) {
  // Groups of 40 and 1 rows, 3 columns: 128 x 4 bytes each; the second group starts at row 4.
  const Batch batch({40, 1});
  TestTensor canonical(DType::kE8M0, {3, 3}), padded(DType::kE8M0, {8, 128});
  std::iota(canonical.as<uint8_t>(), canonical.as<uint8_t>() + 9, uint8_t{1});
  moire_convert_scales_args args{};
  args.source = canonical;
  args.target = padded;
  args.to = MOIRE_SCALES_PADDED;
  args.direction = MOIRE_COLUMNWISE;
  args.k = 3;
  args.groups = batch.groups();
  const reference::ByteRows got = reference::convert_scales(args);
  const std::vector<uint8_t> first(got.bytes.begin(), got.bytes.begin() + 12);
  EXPECT_EQ(first, (std::vector<uint8_t>{1, 4, 0, 0, 2, 5, 0, 0, 3, 6, 0, 0}));
  const std::vector<uint8_t> second(got.bytes.begin() + 512, got.bytes.begin() + 524);
  EXPECT_EQ(second, (std::vector<uint8_t>{7, 0, 0, 0, 8, 0, 0, 0, 9, 0, 0, 0}));
}

}  // namespace
}  // namespace moire::test
