// The quick way to FP8, in 16-bit lanes, against core/fp8.h: blocks of numbers of one size, of
// every storage type, on every target that this machine runs.
#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/backend/quantize_quick_test.cpp"
#include <hwy/foreach_target.h>
// The inline headers come after foreach_target.h.
#include "backend/cpu/quantize_block-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

// Rows of a storage type as both copies.
void quantize_stored(const QuantizeFormat& how, const void* values, DType dtype, int64_t pitch,
                     int64_t rows, int64_t columns, const QuantizedPiece& rowwise,
                     const QuantizedPiece& columnwise) {
  with_format(dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    const PitchedRows<Format> source{static_cast<const typename Format::Element*>(values), pitch};
    QuantizeRowwise(how, source, rows, columns, rowwise);
    QuantizeColumnwise(how, source, rows, columns, columnwise);
  });
}
// One tile of floats.
void quantize_tile(const QuantizeFormat& how, const float* values, int64_t pitch, int64_t rows,
                   int64_t columns, const QuantizedPiece& out) {
  QuantizeTile(how, PitchedRows<Fp32>{values, pitch}, rows, columns, out);
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "core/float_environment.h"
#include "tests/backend/each_target.h"
#include "tests/backend/quantize_blocks.h"
#include "tests/support/random.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(quantize_stored);
HWY_EXPORT(quantize_tile);

float rounded(DType storage, float x) {
  if (storage == DType::kBF16) return bf16_to_float(float_to_bf16(x));
  return storage == DType::kFP16 ? fp16_to_float(float_to_fp16(x)) : x;
}

// Numbers of a storage type of which the largest of every 32 x 32 has this exponent, down to 2^-20
// of it; some with few bits, so that they are codes or lie half way between two.
std::vector<float> even_matrix(std::mt19937_64& random, DType storage, int exponent, int64_t rows,
                               int64_t columns) {
  std::vector<float> out(static_cast<size_t>(rows * columns));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const auto bits = static_cast<uint32_t>(random());
      const uint32_t mask = random() % 4 == 0 ? 0x80780000U : 0x807FFFFFU;
      const int below = r % 32 == c % 32 ? 0 : static_cast<int>(random() % 21);
      const auto at = static_cast<uint32_t>(std::max(exponent - below, 0));
      out[static_cast<size_t>(r * columns + c)] =
          random() % 64 == 0 ? -0.0F
                             : rounded(storage, std::bit_cast<float>((bits & mask) | at << 23));
    }
  }
  return out;
}

template <class Format>
void expect_stored(const QuantizeFormat& how, const std::vector<float>& values, int64_t rows,
                   int64_t columns, DType storage = DType::kFP32) {
  std::vector<uint16_t> bits;
  for (const float v : values) {
    bits.push_back(storage == DType::kBF16 ? float_to_bf16(v) : float_to_fp16(v));
  }
  const void* const stored =
      storage == DType::kFP32 ? static_cast<const void*>(values.data()) : bits.data();
  expect_quantized<Format>(how, values, rows, columns,
                           [&](const QuantizedPiece& rowwise, const QuantizedPiece& columnwise) {
                             HWY_DYNAMIC_DISPATCH(quantize_stored)
                             (how, stored, storage, columns, rows, columns, rowwise, columnwise);
                           });
}

TEST(QuantizeQuick, NumbersOfOneSizeGiveTheBytesOfTheScalarDefinitionAtEveryExponent) {
  const FloatEnvironment exact;
  test::Random fresh;
  for_each_target([&] {
    for (const DType storage : {DType::kBF16, DType::kFP16, DType::kFP32}) {
      for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
        for (int exponent = 0; exponent < 256; ++exponent) {  // 255: infinities and NaN
          if (storage == DType::kFP16 && (exponent < 100 || exponent > 144)) continue;
          SCOPED_TRACE(testing::Message() << dtype_name(storage) << ", scaling " << scaling
                                          << ", exponent " << exponent);
          constexpr int64_t kColumns = 300;
          const std::vector<float> values =
              even_matrix(fresh.engine(), storage, exponent, 32, kColumns);
          expect_stored<E4M3>({DType::kE4M3, scaling, false}, values, 32, kColumns, storage);
          expect_stored<E5M2>({DType::kE5M2, scaling, false}, values, 32, kColumns, storage);
        }
      }
    }
  });
}

// Every finite number of a 16-bit type beside larger ones, a block of 32 by 32 at a time, so that
// all of it goes the quick way.
template <class Format>
void expect_all_quantized(DType element, DType storage, float largest) {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float v = storage == DType::kBF16 ? bf16_to_float(half) : fp16_to_float(half);
    if (std::fabs(v) <= largest) values.push_back(v);
  }
  constexpr int64_t kRows = 32, kColumns = 1024;
  std::vector<float> matrix;
  for (size_t next = 0; next < values.size();) {
    matrix.clear();
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      const bool is_largest = i / kColumns == i % 32;
      matrix.push_back(is_largest ? largest : next < values.size() ? values[next++] : 0);
    }
    expect_stored<Format>({element, MOIRE_SCALING_MXFP8, false}, matrix, kRows, kColumns, storage);
    expect_stored<Format>({element, MOIRE_SCALING_FP8_BLOCK, false}, matrix, kRows, kColumns,
                          storage);
  }
}

TEST(QuantizeQuick, EveryNumberOf16BitsGivesTheBytesOfTheScalarDefinition) {
  const FloatEnvironment exact;
  for_each_target([&] {
    for (const float largest :
         {0x1p-90F, 0x1p-24F, 0x1p-14F, 0.9F, 448.0F, 65504.0F, 0x1.FEp127F}) {
      for (const DType storage : {DType::kBF16, DType::kFP16}) {
        const float there_is = storage == DType::kFP16 ? std::min(largest, 65504.0F) : largest;
        SCOPED_TRACE(testing::Message() << dtype_name(storage) << " up to " << there_is);
        expect_all_quantized<E4M3>(DType::kE4M3, storage, rounded(storage, there_is));
        expect_all_quantized<E5M2>(DType::kE5M2, storage, rounded(storage, there_is));
      }
    }
  });
}

// The middles between neighbouring codes and the codes themselves times 2^exponent, with the floats
// on either side of each: where rounding to odd must not lose which side a number is on.
template <class Format>
std::vector<float> borders(int exponent) {
  std::vector<float> out;
  for (uint8_t code = 0; code < Format::kMaxCode; ++code) {
    const float low = fp8_to_float<Format>(code);
    const float high = fp8_to_float<Format>(static_cast<uint8_t>(code + 1));
    for (const float at : {low, low / 2 + high / 2}) {
      const float x = std::ldexp(at, exponent);
      for (const float v : {std::nextafter(x, 0.0F), x, std::nextafter(x, 2 * x)}) {
        out.insert(out.end(), {v, -v});
      }
    }
  }
  return out;
}

template <class Format>
void expect_borders_quantized(DType element) {
  constexpr int64_t kRows = 32, kColumns = 128;
  for (int exponent = -110; exponent <= 110; exponent += exponent < -90 ? 1 : 25) {
    const std::vector<float> values = borders<Format>(exponent);
    std::vector<float> matrix(static_cast<size_t>(kRows * kColumns));
    for (size_t i = 0; i < matrix.size(); ++i) {
      const bool is_largest = i / kColumns == i % 32;
      matrix[i] = is_largest ? std::ldexp(Format::kMax, exponent) : values[i % values.size()];
    }
    for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
      SCOPED_TRACE(testing::Message() << "times 2^" << exponent << ", scaling " << scaling);
      expect_stored<Format>({element, scaling, false}, matrix, kRows, kColumns);
      const QuantizeFormat tile{element, MOIRE_SCALING_FP8_TILE, false};
      const Block want = quantize<Format>(tile, matrix);
      Copy got(tile, kRows, kColumns, 1, 1);
      HWY_DYNAMIC_DISPATCH(quantize_tile)
      (tile, matrix.data(), kColumns, kRows, kColumns, got.piece());
      ASSERT_EQ(got.fp32[0], want.fp32);
      for (int64_t i = 0; i < kRows * kColumns; ++i) {
        const int64_t at = i / kColumns * got.stride + i % kColumns;
        ASSERT_EQ(got.codes[static_cast<size_t>(at)], want.codes[static_cast<size_t>(i)]);
      }
    }
  }
}

TEST(QuantizeQuick, FloatsBesideTheMiddlesBetweenCodesRoundToTheNearer) {
  const FloatEnvironment exact;
  for_each_target([] {
    expect_borders_quantized<E4M3>(DType::kE4M3);
    expect_borders_quantized<E5M2>(DType::kE5M2);
  });
}

}  // namespace
}  // namespace moire::cpu
#endif
