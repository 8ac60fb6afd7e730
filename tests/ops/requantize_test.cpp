// requantize where scales are powers of two of ordinary size, as quantize makes them: codes change
// their exponents and are never decoded. dequantize_test.cpp has any codes and any scales.
#include <gtest/gtest.h>
#include <moire/quantize.h>

#include "tests/ops/quantize_support.h"
#include "tests/support/ragged.h"

namespace moire::test {
namespace {

// What codes and scales are drawn from.
struct Draw {
  int middle;        // of the scales' exponents, biased
  int spread;        // to either side
  int percent_tiny;  // of subnormal codes and zeros
  bool has_special;  // one infinity or NaN
};
constexpr Draw kDraws[] = {
    {127, 0, 2, false},  {127, 1, 2, false},  {120, 3, 30, false}, {127, 9, 5, false},
    {127, 20, 5, false}, {127, 1, 95, false}, {127, 2, 2, true},   {32, 0, 2, false},
    {33, 4, 2, false},   {219, 3, 2, false},  {5, 5, 2, false},    {245, 8, 2, false},
};

constexpr int64_t kColumns[] = {32, 40, 96, 128, 136, 160, 384};  // with blocks cut short

uint8_t random_code(Random& random, DType element, const Draw& draw) {
  const int64_t step = element == DType::kE4M3 ? 8 : 4,
                last = element == DType::kE4M3 ? 0x7E : 0x7B;
  const bool is_tiny = random.integer(0, 99) < draw.percent_tiny;
  const int64_t magnitude = is_tiny ? random.integer(0, step - 1) : random.integer(step, last);
  return static_cast<uint8_t>(magnitude + 128 * random.integer(0, 1));
}

void fill(const TestCopy& copy, const Draw& draw, Random& random) {
  const TensorView data = copy.data.view(), scales = copy.scales.view();
  for (int64_t i = 0; i < data.num_rows(); ++i) {
    for (int64_t j = 0; j < data.columns(); ++j) {
      uint8_t& code = static_cast<uint8_t*>(data.data)[i * data.stride() + j];
      code = random_code(random, data.type(), draw);
      // Rows and columns of zeros, of either sign.
      if (i % 37 == 5 || j % 41 == 7) code &= 0x80;
    }
  }
  if (draw.has_special) {
    const int64_t i = random.integer(0, data.num_rows() - 1);
    static_cast<uint8_t*>(data.data)[i * data.stride()] = 0x7F;
  }
  for (int64_t i = 0; i < scales.num_rows(); ++i) {
    for (int64_t j = 0; j < scales.columns(); ++j) {
      const auto exponent =
          static_cast<uint32_t>(draw.middle + random.integer(-draw.spread, draw.spread));
      const int64_t at = i * scales.stride() + j;
      if (scales.type() == DType::kE8M0) {
        static_cast<uint8_t*>(scales.data)[at] = static_cast<uint8_t>(exponent);
      } else {
        static_cast<float*>(scales.data)[at] = std::bit_cast<float>(exponent << 23);
      }
    }
  }
}

class Requantize : public testing::TestWithParam<RaggedCase> {};
INSTANTIATE_TEST_SUITE_P(Table, Requantize, testing::ValuesIn(ragged_table()), case_name);

TEST_P(Requantize, OrdinaryScalesGiveTheBytesOfDecodingAndQuantisingAgain) {
  Random random;
  const Batch batch(GetParam());
  const Tested device = Tested::finding(tested(2));
  if (batch.capacity() == 0) GTEST_SKIP() << "no rows";
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      for (const Draw& draw : kDraws) {
        const DType element = random.integer(0, 1) == 0 ? DType::kE4M3 : DType::kE5M2;
        const int64_t k = any_of(random, kColumns);
        const TestCopy source(element, scaling, direction, batch.groups(), k);
        fill(source, draw, random);
        const TestCopy target(element, scaling, 1 - direction, batch.groups(), k, 2);
        RequantizeArgs args;
        args.source = source;
        args.scaling = scaling;
        args.direction = direction;
        args.target = target;
        args.groups = batch.groups();
        ASSERT_TRUE(succeeds(run(device, args)));
        ASSERT_TRUE(same_bytes(target, reference::requantize(args)))
            << scaling_name(scaling) << " direction " << direction << " " << dtype_name(element)
            << " columns " << k << " exponents " << draw.middle << " +- " << draw.spread;
      }
    }
  }
}

TEST(RequantizeOp, WideStripsPastTheCacheGiveTheBytesOfDecodingAndQuantisingAgain) {
  constexpr int64_t kRows = 1152, kWidth = 7424;
  static_assert(kRows * kWidth >= 8 << 20);
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      Random random;
      const int64_t block = scale_block(scaling);
      const Groups one(nullptr, 1, kRows);
      const TestCopy source(DType::kE4M3, scaling, direction, one, kWidth);
      fill(source, {120, 1, 1, false}, random);
      const TestWorkspace memory(kRows * kWidth);  // aligned, unlike test tensors
      const TensorView target(memory.get().data, DType::kE4M3, {kRows, kWidth});
      const TestCopy scales(DType::kE4M3, scaling, 1 - direction, one, kWidth);
      RequantizeArgs args;
      args.source = source;
      args.scaling = scaling;
      args.direction = direction;
      args.target = Quantized(target, scales.scales);
      ASSERT_TRUE(succeeds(requantize(cpu(2), args)));
      const int64_t b = random.integer(0, kRows / block - 1);
      const auto part_of = [&](const TensorView& data, const TensorView& s, int32_t way) {
        return Quantized(data.slice(b * block, block),
                         way == MOIRE_ROWWISE ? s.slice(b * block, block) : s.slice(b, 2));
      };
      RequantizeArgs part = args;
      part.source = part_of(source.data, source.scales, direction);
      part.target = part_of(target, scales.scales, 1 - direction);
      const reference::QuantizedBytes want = reference::requantize(part);
      EXPECT_TRUE(same_bytes(part.target.data, want.data, MOIRE_TAIL_ZERO)) << b;
      EXPECT_TRUE(memory.is_undamaged());
    }
  }
}

}  // namespace
}  // namespace moire::test
