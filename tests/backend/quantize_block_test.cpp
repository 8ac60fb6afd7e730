// Quantised pieces of a matrix against core/fp8.h, on every target that this machine runs.
#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/backend/quantize_block_test.cpp"
#include <hwy/foreach_target.h>
// The inline headers come after foreach_target.h.
#include "backend/cpu/quantize_block-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

void quantize_block(const QuantizeFormat& how, const float* values, int64_t pitch, int64_t rows,
                    int64_t columns, const QuantizedPiece& rowwise,
                    const QuantizedPiece& columnwise) {
  QuantizeBlock(how, values, pitch, rows, columns, rowwise, columnwise);
}
// The same of floats that are BF16 numbers, stored as such.
void quantize_bf16_block(const QuantizeFormat& how, const uint16_t* values, int64_t pitch,
                         int64_t rows, int64_t columns, const QuantizedPiece& rowwise,
                         const QuantizedPiece& columnwise) {
  const PitchedRows<Bf16> source{values, pitch};
  QuantizeRowwise(how, source, rows, columns, rowwise);
  QuantizeColumnwise(how, source, rows, columns, columnwise);
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/float_environment.h"
#include "tests/backend/each_target.h"
#include "tests/support/random.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(quantize_block);
HWY_EXPORT(quantize_bf16_block);

// What the scalar definition makes of one block.
struct Block {
  std::vector<uint8_t> codes;
  uint8_t e8m0 = 0;
  float fp32 = 0;
};

template <class Format>
Block quantize(const QuantizeFormat& how, const std::vector<float>& values) {
  float amax = 0;
  for (const float v : values) amax = std::fabs(v) > amax ? std::fabs(v) : amax;
  Block out;
  const BlockScale scale = block_scale<Format>(amax, how.fractional);
  out.e8m0 = mx_scale<Format>(amax);
  out.fp32 = scale.scale;
  const float multiplier =
      how.scaling == MOIRE_SCALING_MXFP8 ? e8m0_reciprocal(out.e8m0) : scale.multiplier;
  for (const float v : values) out.codes.push_back(float_to_fp8<Format>(v * multiplier));
  return out;
}

// A copy with its guards: 0xA5 in every byte that is not an element.
struct Copy {
  Copy(const QuantizeFormat& how, int64_t rows, int64_t columns, int64_t scale_rows,
       int64_t scale_columns)
      : stride(columns + 5),
        scale_stride(scale_columns + 3),
        codes(static_cast<size_t>(rows * stride), 0xA5),
        e8m0(static_cast<size_t>(scale_rows * scale_stride), 0xA5),
        fp32(e8m0.size(), -77.0F),
        is_mx(how.scaling == MOIRE_SCALING_MXFP8) {}
  QuantizedPiece piece() {
    return {codes.data(), stride, is_mx ? static_cast<void*>(e8m0.data()) : fp32.data(),
            scale_stride};
  }
  void set_scale(int64_t row, int64_t column, const Block& block) {
    const auto at = static_cast<size_t>(row * scale_stride + column);
    (is_mx ? static_cast<void>(e8m0[at] = block.e8m0) : static_cast<void>(fp32[at] = block.fp32));
  }
  bool operator==(const Copy& other) const {
    return codes == other.codes && e8m0 == other.e8m0 && fp32 == other.fp32;
  }

  int64_t stride, scale_stride;
  std::vector<uint8_t> codes, e8m0;
  std::vector<float> fp32;
  bool is_mx;
};

float hard_value(std::mt19937_64& random) {
  const auto bits = static_cast<uint32_t>(random());
  switch (random() % 40) {
    case 0:
      return std::numeric_limits<float>::quiet_NaN();
    case 1:
      return std::numeric_limits<float>::infinity();
    case 2:
      return std::bit_cast<float>(bits & 0x800FFFFFU);  // subnormal
    case 3:
      return -0.0F;
    default:
      return std::bit_cast<float>((bits & 0x807FFFFFU) | (100U + bits % 50U) << 23);
  }
}

// A matrix whose columns differ: hard values, zeros, NaN alone, plain numbers, any bits.
std::vector<float> hard_matrix(std::mt19937_64& random, int64_t rows, int64_t columns) {
  std::vector<float> out(static_cast<size_t>(rows * columns));
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < out.size(); ++i) {
    const auto kind = i % static_cast<size_t>(columns) / 5 % 5;
    out[i] = kind == 0   ? hard_value(random)
             : kind == 1 ? 0.0F
             : kind == 2 ? std::numeric_limits<float>::quiet_NaN()
             : kind == 3 ? normal(random)
                         : std::bit_cast<float>(static_cast<uint32_t>(random()));
  }
  return out;
}

// BF16 numbers of which the largest of every 32 x 32 has this exponent, down to 2^-20 of it.
std::vector<float> even_matrix(std::mt19937_64& random, int exponent, int64_t rows,
                               int64_t columns) {
  std::vector<float> out(static_cast<size_t>(rows * columns));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const auto bits = static_cast<uint32_t>(random());
      const int below = r % 32 == c % 32 ? 0 : static_cast<int>(bits % 21);
      const auto at = static_cast<uint32_t>(std::max(exponent - below, 0));
      out[static_cast<size_t>(r * columns + c)] =
          bits % 64 == 63 ? 0.0F : std::bit_cast<float>((bits & 0x807F0000U) | at << 23);
    }
  }
  return out;
}

enum class Storage { kFp32, kBf16 };

template <class Format>
void expect_quantized(const QuantizeFormat& how, const std::vector<float>& values, int64_t rows,
                      int64_t columns, Storage storage = Storage::kFp32) {
  const int64_t block = how.block(), row_blocks = (columns + block - 1) / block;
  const auto at = [&](int64_t r, int64_t c) {
    return values[static_cast<size_t>(r * columns + c)];
  };
  Copy got_rows(how, rows, columns, rows, row_blocks), got_columns(how, rows, columns, 1, columns);
  Copy want_rows = got_rows, want_columns = got_columns;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < row_blocks; ++b) {
      const auto begin = values.begin() + r * columns + b * block;
      const int64_t n = std::min(block, columns - b * block);
      const Block want = quantize<Format>(how, {begin, begin + n});
      std::copy(want.codes.begin(), want.codes.end(),
                want_rows.codes.begin() + r * want_rows.stride + b * block);
      want_rows.set_scale(r, b, want);
    }
  }
  for (int64_t c = 0; c < columns; ++c) {
    std::vector<float> column;
    for (int64_t r = 0; r < rows; ++r) column.push_back(at(r, c));
    const Block want = quantize<Format>(how, column);
    for (int64_t r = 0; r < rows; ++r) {
      want_columns.codes[static_cast<size_t>(r * want_columns.stride + c)] =
          want.codes[static_cast<size_t>(r)];
    }
    want_columns.set_scale(0, c, want);
  }
  if (storage == Storage::kBf16) {
    std::vector<uint16_t> bits;
    for (const float v : values) bits.push_back(float_to_bf16(v));
    HWY_DYNAMIC_DISPATCH(quantize_bf16_block)
    (how, bits.data(), columns, rows, columns, got_rows.piece(), got_columns.piece());
  } else {
    HWY_DYNAMIC_DISPATCH(quantize_block)
    (how, values.data(), columns, rows, columns, got_rows.piece(), got_columns.piece());
  }
  ASSERT_TRUE(got_rows == want_rows) << "rowwise " << rows << " x " << columns;
  ASSERT_TRUE(got_columns == want_columns) << "columnwise " << rows << " x " << columns;
}

TEST(QuantizeBlock, GivesTheBytesOfTheScalarDefinitionAndWritesNoOther) {
  const FloatEnvironment exact;
  test::Random fresh;
  for_each_target([&] {
    for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
      for (const bool fractional : {false, true}) {
        for (const int64_t columns : {1, 7, 31, 32, 33, 64, 128, 131, 160}) {
          for (const int64_t rows : {1, 5, 32}) {
            SCOPED_TRACE(scaling);
            const std::vector<float> values = hard_matrix(fresh.engine(), rows, columns);
            expect_quantized<E4M3>({DType::kE4M3, scaling, fractional}, values, rows, columns);
            expect_quantized<E5M2>({DType::kE5M2, scaling, fractional}, values, rows, columns);
          }
        }
      }
    }
  });
}

TEST(QuantizeBlock, BF16NumbersGiveTheBytesOfTheScalarDefinitionAtEveryExponent) {
  const FloatEnvironment exact;
  test::Random fresh;
  for_each_target([&] {
    for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
      for (int exponent = 0; exponent < 256; ++exponent) {  // 255: infinities and NaN
        SCOPED_TRACE(testing::Message() << scaling << ", exponent " << exponent);
        constexpr int64_t kColumns = 300;
        const std::vector<float> values = even_matrix(fresh.engine(), exponent, 32, kColumns);
        expect_quantized<E4M3>({DType::kE4M3, scaling, false}, values, 32, kColumns,
                               Storage::kBf16);
        expect_quantized<E5M2>({DType::kE5M2, scaling, false}, values, 32, kColumns,
                               Storage::kBf16);
      }
    }
  });
}

TEST(QuantizeBlock, ColumnScalesOfEveryAmaxAreTheScalarOnes) {
  const FloatEnvironment exact;
  // One column per amax: each exponent with mantissas around the points where scales change.
  std::vector<float> values;
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (const uint32_t mantissa :
         {0U, 1U, 0x3FFFFFU, 0x400000U, 0x400001U, 0x5FFFFFU, 0x600000U, 0x600001U, 0x7FFFFFU}) {
      values.push_back(std::bit_cast<float>(exponent << 23 | mantissa));
    }
  }
  const auto columns = static_cast<int64_t>(values.size());
  for_each_target([&] {
    for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
      const QuantizeFormat how{DType::kE4M3, scaling, false};
      Copy got(how, 1, columns, 1, columns), want = got;
      HWY_DYNAMIC_DISPATCH(quantize_block)
      (how, values.data(), columns, 1, columns, {}, got.piece());
      for (int64_t c = 0; c < columns; ++c) {
        const Block block = quantize<E4M3>(how, {values[static_cast<size_t>(c)]});
        want.codes[static_cast<size_t>(c)] = block.codes[0];
        want.set_scale(0, c, block);
      }
      ASSERT_EQ(got.codes, want.codes);
      ASSERT_EQ(got.e8m0, want.e8m0);
      ASSERT_EQ(got.fp32, want.fp32);
    }
  });
}

}  // namespace
}  // namespace moire::cpu
#endif
