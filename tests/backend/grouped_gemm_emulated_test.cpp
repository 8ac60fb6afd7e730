// Products as Hopper's FP8 tensor cores make them: sums that an H200 gave, the definition over
// every op, fold included, and how far that is from exact sums.
#include <gtest/gtest.h>

#include "reference/fp8.h"
#include "tests/support/grouped_gemm_cases.h"

namespace moire::test {
namespace {

constexpr Fp8 kMx{DType::kE4M3, DType::kE8M0};
constexpr Fp8 kBlock{DType::kE4M3, DType::kFP32};

GemmOptions options(const Fp8& format, int32_t layout, int32_t accumulation) {
  GemmOptions o;
  o.a = o.b = format;
  o.layout = layout;
  o.accumulation = accumulation;
  return o;
}

// The product of a row of a with a row of b, MXFP8, in emulated sums.
double emulated_product(const TestTensor& a, const TestTensor& a_scales, const TestTensor& b,
                        const TestTensor& b_scales) {
  const TestTensor d(DType::kFP32, {1, 1});
  const Batch batch({1});
  GroupedGemmArgs args;
  args.a = a;
  args.a_scales = a_scales;
  args.b = Weight(b.view());
  args.b_scales = b_scales;
  args.d = d;
  args.groups = batch.groups();
  args.accumulation = MOIRE_ACCUMULATE_EMULATED;
  EXPECT_TRUE(succeeds(run(cpu(1), args)));
  return d.get(0, 0);
}

// The emulated sum of 2^exponents[k] (nothing where 0x7F00), one block of 32 each, times ones.
constexpr int kNothing = 0x7F00;
double sum_of(const std::vector<std::vector<int>>& blocks, double sign = 1) {
  const auto k = static_cast<int64_t>(32 * blocks.size());
  TestTensor a(DType::kE5M2, {1, k}), a_scales(DType::kE8M0, {1, k / 32});
  TestTensor b(DType::kE5M2, {1, 1, k}), b_scales(DType::kE8M0, {1, 1, k / 32});
  std::fill_n(a.as<uint8_t>(), k, uint8_t{0});
  std::fill_n(b.as<uint8_t>(), k, uint8_t{0x3C});  // 1
  for (size_t i = 0; i < blocks.size(); ++i) {
    a_scales.as<uint8_t>()[i] = b_scales.as<uint8_t>()[i] = 127;
    for (size_t j = 0; j < blocks[i].size(); ++j) {
      if (blocks[i][j] == kNothing) continue;
      a.as<uint8_t>()[32 * i + j] =
          static_cast<uint8_t>(((blocks[i][j] + 15) << 2) + (sign < 0 && j != 0 ? 128 : 0));
    }
  }
  return emulated_product(a, a_scales, b, b_scales);
}

TEST(EmulatedSums, KeepThirteenFractionBitsOfTheLargestTerm) {
  EXPECT_EQ(sum_of({{0, -13}}), 1 + 0x1p-13);
  EXPECT_EQ(sum_of({{0, -14}}), 1);
  EXPECT_EQ(sum_of({{0, -14, -14}}), 1);  // each term is cut, not their sum
  EXPECT_EQ(sum_of({{1, -13}}), 2);
  EXPECT_EQ(sum_of({{0, -13}}, -1), 1 - 0x1p-13);
  EXPECT_EQ(sum_of({{0, -14}}, -1), 1);  // towards zero
}

TEST(EmulatedSums, AlignWhatIsAccumulatedWithTheNextProducts) {
  EXPECT_EQ(sum_of({{-10}, {0}}), 1 + 0x1p-10);
  EXPECT_EQ(sum_of({{-14}, {0}}), 1);
  EXPECT_EQ(sum_of({{0}, {-14}}), 1);
  EXPECT_EQ(sum_of({{0}, {-13}}), 1 + 0x1p-13);
}

TEST(EmulatedSums, ArePromotedToFp32After128Products) {
  EXPECT_EQ(sum_of({{0}, {}, {}, {-14}}), 1);
  EXPECT_EQ(sum_of({{0}, {}, {}, {}, {-14}}), 1 + 0x1p-14);
  // The next K block, and its second promotion.
  EXPECT_EQ(sum_of({{0}, {}, {}, {}, {}, {}, {}, {}, {-14}, {}, {}, {}, {-14}}), 1 + 0x1p-13);
}

TEST(EmulatedSums, PassOnInfinityAndNan) { EXPECT_TRUE(std::isinf(sum_of({{0, 16}}))); }

// The emulated sum of up to 32 products of E4M3 elements.
double sum_of(const std::vector<std::pair<double, double>>& products) {
  TestTensor a(DType::kE4M3, {1, 32}), b(DType::kE4M3, {1, 1, 32});
  TestTensor a_scales(DType::kE8M0, {1, 1}), b_scales(DType::kE8M0, {1, 1, 1});
  a_scales.as<uint8_t>()[0] = b_scales.as<uint8_t>()[0] = 127;
  for (size_t i = 0; i < 32; ++i) {
    const auto [x, y] = i < products.size() ? products[i] : std::pair(0.0, 0.0);
    a.as<uint8_t>()[i] = reference::encode_fp8(DType::kE4M3, x);
    b.as<uint8_t>()[i] = reference::encode_fp8(DType::kE4M3, y);
  }
  return emulated_product(a, a_scales, b, b_scales);
}

TEST(EmulatedSums, AreThoseThatAnH200Gave) {
  using Products = std::vector<std::pair<double, double>>;
  // Not the product's exponent counts, but its factors': 1.75 * 1.75 is more than 2.
  EXPECT_EQ(sum_of(Products{{1.75, 1.75}, {0x1p-6, 0x1p-6}}), 0x1.8808p+1);
  EXPECT_EQ(sum_of(Products{{1.75, 1.75}, {0x1p-6, 0x1p-7}}), 0x1.88p+1);
  EXPECT_EQ(sum_of(Products{{1.75, 1.75}, {0x1p-6, -0x1p-7}}), 0x1.87f8p+1);
  // A subnormal factor has the exponent of the smallest normal one.
  EXPECT_EQ(sum_of(Products{{0x1.8p-8, 0x1p8}, {0x1p-5, 0x1p-6}}), 0x1.802p+0);
  EXPECT_EQ(sum_of(Products{{0x1.8p-8, 0x1p8}, {0x1p-6, 0x1p-6}}), 0x1.8p+0);
  // A product that is zero has none.
  EXPECT_EQ(sum_of(Products{{0, 0x1p8}, {0x1p-9, 0x1p-9}}), 0x1p-18);
  // The sum keeps 13 bits too: 90, and a little less than 90.
  Products products(30, {1.5, 2.0});
  products.push_back({0x1p-4, 0x1p-5});
  EXPECT_EQ(sum_of(products), 90);
  products.back() = {0x1p-6, -0x1p-6};
  EXPECT_EQ(sum_of(products), 0x1.67f8p+6);
  products.back() = {0x1p-6, -0x1p-7};
  EXPECT_EQ(sum_of(products), 90);
}

double relative_rms(const TestTensor& got, const TestTensor& want, const Batch& batch) {
  double error = 0, size = 0;
  for (int64_t i = 0; i < batch.rows(); ++i) {
    for (int64_t j = 0; j < want.view().columns(); ++j) {
      error += std::pow(got.get(i, j) - want.get(i, j), 2);
      size += std::pow(want.get(i, j), 2);
    }
  }
  return std::sqrt(error / size);
}

void expect_in_range(double error) {
  EXPECT_GE(error, 1e-5);
  EXPECT_LE(error, 5e-3);
}

TEST(EmulatedSums, AreAsFarFromExactSumsAsTheDevice) {
  Random random;
  const Batch batch({40, 0, 13});
  for (const Fp8& format : {kMx, kBlock}) {
    for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
      SCOPED_TRACE(testing::Message() << format << ", layout " << layout);
      GemmCase exact(random, batch, 40, 700, false,
                     options(format, layout, MOIRE_ACCUMULATE_EXACT));
      GemmCase emulated = exact, fast = exact;
      emulated.options.accumulation = MOIRE_ACCUMULATE_EMULATED;
      fast.options.accumulation = MOIRE_ACCUMULATE_FAST;
      for (GemmCase* c : {&exact, &emulated, &fast}) ASSERT_TRUE(succeeds(c->run(cpu(2))));
      EXPECT_TRUE(same_bits(fast.d, exact.d));
      EXPECT_TRUE(matches(exact.d, reference::grouped_gemm(exact.args()), batch.groups()));
      expect_in_range(relative_rms(emulated.d, exact.d, batch));
    }
  }
}

// Blocks far below and above the others, of zero and of NaN.
void spread(TestTensor& scales, Random& random) {
  if (scales.view().type() != DType::kE8M0) return;
  for (int64_t i = 0; i < scales.view().num_elements(); ++i) {
    uint8_t& code = scales.as<uint8_t>()[i];
    const int64_t kind = random.integer(0, 999);
    if (code != 255 && kind < 400) code = static_cast<uint8_t>(code - random.integer(0, 20));
    if (code != 255 && kind >= 990) code = static_cast<uint8_t>(code + random.integer(0, 9));
    if (kind == 985) code = 0;
    if (kind == 986) code = 255;
  }
}

TEST(EmulatedSums, AreTheDefinitionsWhateverIsFolded) {
  Random random;
  const Batch batch({150, 0, 13}), few({20, 0, 13});
  const Fp8 formats[] = {kMx, kBlock, {DType::kE5M2, DType::kE8M0}, {DType::kE5M2, DType::kFP32}};
  for (const Fp8& a : formats) {
    for (const Fp8& b : formats) {
      GemmOptions o = options(a, MOIRE_OUT_IN, MOIRE_ACCUMULATE_EMULATED);
      o.b = b;
      o.layout = random.integer(0, 1) != 0 ? MOIRE_OUT_IN : MOIRE_IN_OUT;
      o.beta = 1;
      SCOPED_TRACE(testing::Message() << o);
      GemmCase gemm(random, few, 131, 160, random.integer(0, 1) != 0, o);
      spread(gemm.a.scales, random);
      spread(gemm.b_scales, random);
      const reference::Matrix product = reference::grouped_gemm(gemm.args());
      ASSERT_TRUE(succeeds(gemm.run(cpu(2))));
      EXPECT_TRUE(matches(gemm.d, product, few.groups()));

      WgradCase wgrad(random, batch, 20, 30, o);
      spread(wgrad.a.scales, random);
      spread(wgrad.b.scales, random);
      const reference::Weights sums = reference::grouped_gemm_wgrad(wgrad.args());
      ASSERT_TRUE(succeeds(wgrad.run(cpu(2))));
      EXPECT_TRUE(matches(wgrad.d, sums));
    }
  }
}

TEST(EmulatedSums, AreThoseOfTheUnfusedCallAndOfAnyThreads) {
  Random random;
  const Batch batch({40, 0, 13});
  const GemmOptions o = options(kMx, MOIRE_OUT_IN, MOIRE_ACCUMULATE_EMULATED);
  GemmGluCase glu(random, batch, 30, 300, o);
  ASSERT_TRUE(succeeds(glu.run(cpu(2))));
  TestTensor z(DType::kFP32, {batch.capacity(), 60});
  GroupedGemmArgs args;
  args.a = glu.a.rows;
  args.a_scales = glu.a.scales;
  args.b = glu.b;
  args.b_scales = glu.b_scales;
  args.bias = glu.bias;
  args.d = z;
  args.groups = batch.groups();
  args.accumulation = MOIRE_ACCUMULATE_EMULATED;
  ASSERT_TRUE(succeeds(run(cpu(1), args)));
  EXPECT_TRUE(same_bits(glu.z, z));
}

// A comparison with a call that no GPU takes is the CPU's from its start.
TEST(EmulatedSums, AreComparedOnOneDevice) {
  Random random;
  const Batch batch({9});
  std::vector<Device> devices;
  on_one_device(tested(), [&](const Tested& device) {
    devices.push_back(device.device());
    for (const int32_t accumulation : {MOIRE_ACCUMULATE_EXACT, MOIRE_ACCUMULATE_EMULATED}) {
      const GemmCase c(random, batch, 40, 300, false, options(kMx, MOIRE_OUT_IN, accumulation));
      ASSERT_TRUE(succeeds(c.run(device)));
    }
  });
  std::vector<Device> want{Device::kCpu};
  if (tested_device() == Device::kCuda) want.insert(want.begin(), Device::kCuda);
  EXPECT_EQ(devices, want);
}

TEST(EmulatedSums, OfWeightGradientsStartAtEachGroup) {
  Random random;
  const Batch batch({150, 90});
  GemmOptions o = options(kMx, MOIRE_OUT_IN, MOIRE_ACCUMULATE_EXACT);
  WgradCase exact(random, batch, 20, 30, o);
  WgradCase emulated = exact;
  emulated.options.accumulation = MOIRE_ACCUMULATE_EMULATED;
  ASSERT_TRUE(succeeds(exact.run(cpu(2))));
  ASSERT_TRUE(succeeds(emulated.run(cpu(2))));
  double error = 0, size = 0;
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t i = 0; i < 20; ++i) {
      for (int64_t j = 0; j < 30; ++j) {
        error += std::pow(emulated.d.get(g, i, j) - exact.d.get(g, i, j), 2);
        size += std::pow(exact.d.get(g, i, j), 2);
      }
    }
  }
  expect_in_range(std::sqrt(error / size));
}

}  // namespace
}  // namespace moire::test
