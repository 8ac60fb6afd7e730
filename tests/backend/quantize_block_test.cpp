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

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <random>
#include <vector>

#include "core/float_environment.h"
#include "tests/backend/each_target.h"
#include "tests/backend/quantize_blocks.h"
#include "tests/support/random.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(quantize_block);

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

template <class Format>
void expect_block(const QuantizeFormat& how, const std::vector<float>& values, int64_t rows,
                  int64_t columns) {
  expect_quantized<Format>(how, values, rows, columns,
                           [&](const QuantizedPiece& rowwise, const QuantizedPiece& columnwise) {
                             HWY_DYNAMIC_DISPATCH(quantize_block)
                             (how, values.data(), columns, rows, columns, rowwise, columnwise);
                           });
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
            expect_block<E4M3>({DType::kE4M3, scaling, fractional}, values, rows, columns);
            expect_block<E5M2>({DType::kE5M2, scaling, fractional}, values, rows, columns);
          }
        }
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
