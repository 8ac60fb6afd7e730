// The grouped GEMMs on Hopper's FP8 tensor cores, where MOIRE_ACCUMULATE_FAST allows them: against
// the reference, within what those may cut off, with everything optional; against their emulation
// by the CPU, to the bit; the same bits with every tile; and more tiles than blocks, exactly.
#include <algorithm>
#include <string>

#include "tests/gpu/gpu.h"
#include "tests/ops/quantize_support.h"
#include "tests/support/expect.h"
#include "tests/support/grouped_gemm_cases.h"
#include "tests/support/tested.h"

namespace moire::test {
namespace {

constexpr Fp8 kMx4{DType::kE4M3, DType::kE8M0}, kMx5{DType::kE5M2, DType::kE8M0};
constexpr Fp8 kBlock4{DType::kE4M3, DType::kFP32}, kBlock5{DType::kE5M2, DType::kFP32};

class Fp8TensorCores : public Hopper {
 protected:
  // On FP8 tensor cores, and as the reference has it.
  template <class Case>
  void check(const Case& c) const {
    SCOPED_TRACE(testing::Message() << c.options << c.variant());
    const std::string found = policy(c.args());
    EXPECT_TRUE(found.starts_with("FP8 tensor cores")) << found;
    const auto want = reference::truth(as_emulated(c.args()));
    ASSERT_TRUE(succeeds(c.run(alone())));
    EXPECT_TRUE(outputs_match(c.args(), want));
    EXPECT_TRUE(c.is_undamaged());
  }

 private:
  // What the reference judges, and a CPU computes: FP8 tensor cores' sums are those of their
  // emulation.
  template <class A>
  static A as_emulated(A args) {
    args.accumulation = MOIRE_ACCUMULATE_EMULATED;
    return args;
  }
};

GemmOptions options(const Fp8& a, const Fp8& b, int32_t layout) {
  GemmOptions o;
  o.a = a;
  o.b = b;
  o.operands = o.output = DType::kBF16;
  o.layout = layout;
  o.accumulation = MOIRE_ACCUMULATE_FAST;
  return o;
}

// Each format of an activation or gradient beside each of a weight, both layouts, gathered or not,
// with and without what is optional.
template <class F>
void for_each_option(F&& f) {
  int variant = 0;
  for (const Fp8& a : {kBlock4, kBlock5, kMx4, kMx5}) {
    for (const Fp8& b : {kBlock4, kMx4}) {
      for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
        GemmOptions o = options(a, b, layout);
        o.row_idx = variant % 3 == 0   ? DType::kNone
                    : variant % 3 == 1 ? DType::kInt32
                                       : DType::kInt64;
        o.extras = variant % 4 != 3;
        o.tail = variant % 2 == 0 ? MOIRE_TAIL_ZERO : MOIRE_TAIL_UNTOUCHED;
        SCOPED_TRACE(testing::Message() << o);
        f(o);
        ++variant;
      }
    }
  }
}

TEST_F(Fp8TensorCores, MultiplyAsTheReferenceDoes) {
  Random random;
  const Batch batch({70, 0, 129, 5}, 9);
  for_each_option([&](const GemmOptions& o) {
    for (const bool transpose_b : {false, true}) {
      check(GemmCase(random, batch, 208, 400, transpose_b, o));
    }
  });
}

TEST_F(Fp8TensorCores, ActivateAsTheReferenceDoes) {
  Random random;
  const Batch batch({70, 0, 129, 5}, 9);
  for_each_option([&](const GemmOptions& o) { check(GemmGluCase(random, batch, 112, 272, o)); });
}

TEST_F(Fp8TensorCores, ActivateBackwardsAsTheReferenceDoes) {
  Random random;
  const Batch batch({70, 0, 129, 5}, 9);
  for_each_option(
      [&](const GemmOptions& o) { check(GemmGluBackwardCase(random, batch, 112, 272, o)); });
}

// F, and how gate and up lie.
struct Lying {
  int64_t f;
  GluLayout glu;
};
const Lying kTakenInOnePass[] = {
    {256, GluLayout::halves()},       {256, GluLayout::interleaved(128, MOIRE_UP_FIRST)},
    {240, GluLayout::interleaved(8)}, {160, GluLayout::interleaved(32, MOIRE_UP_FIRST)},
    {80, GluLayout::interleaved(1)},  {80, GluLayout::interleaved(1, MOIRE_UP_FIRST)},
    {208, GluLayout::ungated()}};
const Activation kActivations[] = {Activation::swiglu(), Activation::clamped_swiglu(),
                                   Activation::geglu_tanh(), Activation::reglu(),
                                   Activation::reglu2()};

// Where copies alone are asked for the activation makes them; beside what they are copies of they
// are made behind it. Every activation is met, and both types of gradients.
TEST_F(Fp8TensorCores, QuantiseInOnePassWhatTheyWouldStore) {
  Random random;
  const Batch batch({70, 0, 129, 256, 5}, 9);
  int variant = 0;
  for (const auto& [f, glu] : kTakenInOnePass) {
    for (const Activation& activation : kActivations) {
      GemmOptions o = options(kBlock4, kBlock4, MOIRE_OUT_IN);
      o.glu = glu;
      o.activation = activation;
      o.tail = variant % 2 == 0 ? MOIRE_TAIL_ZERO : MOIRE_TAIL_UNTOUCHED;
      const DType gradient = variant % 3 == 0 ? DType::kE5M2 : DType::kE4M3;
      SCOPED_TRACE(testing::Message() << o << ", F " << f << ", " << dtype_name(gradient));
      const int fractional = variant++ % 3;  // 2: MXFP8, folded
      const auto copy = [&](DType element, int32_t direction, int64_t columns) {
        return TestCopy(element, MOIRE_SCALING_FP8_BLOCK, direction, batch.groups(), columns);
      };
      const GemmGluCase forward(random, batch, f, 144, o);
      GroupedGemmGluArgs glu_args = forward.args();
      const GemmGluBackwardCase backward(random, batch, f, 144, o);
      GroupedGemmGluBackwardArgs grad_args = backward.args();
      TestCopy copies[2][5];
      TestTensor grad_probs[2], grad_bias[2];
      const bool has_bias = variant % 3 != 0;
      grad_args.beta = variant % 2;
      for (int one_pass = 0; one_pass < 2; ++one_pass) {
        TestCopy* const c = copies[one_pass];
        glu_args.act_rowwise = c[0] = copy(DType::kE4M3, MOIRE_ROWWISE, f);
        glu_args.act_columnwise = c[1] = copy(DType::kE4M3, MOIRE_COLUMNWISE, f);
        grad_args.grad_z_rowwise = c[2] = copy(gradient, MOIRE_ROWWISE, o.halves() * f);
        grad_args.grad_z_columnwise = c[3] = copy(gradient, MOIRE_COLUMNWISE, o.halves() * f);
        grad_args.act_columnwise = c[4] = copy(DType::kE4M3, MOIRE_COLUMNWISE, f);
        grad_args.grad_probs = grad_probs[one_pass] = TestTensor(DType::kFP32, {batch.capacity()});
        grad_bias[one_pass] = TestTensor(DType::kFP32, {5, o.halves() * f});
        for (int64_t i = 0; i < 5 * o.halves() * f; ++i) grad_bias[one_pass].as<float>()[i] = 0.5F;
        grad_args.grad_bias = has_bias ? grad_bias[one_pass].view() : TensorView();
        glu_args.fractional_scales = grad_args.fractional_scales = fractional;
        if (one_pass == 1) glu_args.act = grad_args.act = grad_args.grad_z = {};
        for (const std::string& found : {policy(glu_args), policy(grad_args)}) {
          EXPECT_EQ(found.find("in the same pass") != std::string::npos, one_pass == 1) << found;
        }
        ASSERT_TRUE(succeeds(run(alone(), glu_args)));
        ASSERT_TRUE(succeeds(run(alone(), grad_args)));
      }
      for (int i = 0; i < 5; ++i) {
        EXPECT_TRUE(same_bits(copies[0][i].data, copies[1][i].data)) << "copy " << i;
        EXPECT_TRUE(same_bits(copies[0][i].scales, copies[1][i].scales)) << "scales " << i;
      }
      EXPECT_TRUE(same_bits(grad_probs[0], grad_probs[1]));
      EXPECT_TRUE(same_bits(grad_bias[0], grad_bias[1]));
      EXPECT_TRUE(grad_bias[1].is_undamaged());
      // One copy of each alone.
      const TestCopy rows = copy(gradient, MOIRE_ROWWISE, o.halves() * f);
      const TestCopy columns = copy(DType::kE4M3, MOIRE_COLUMNWISE, f);
      grad_args.grad_z_rowwise = rows;
      grad_args.grad_z_columnwise = grad_args.act_columnwise = glu_args.act_rowwise = {};
      glu_args.act_columnwise = columns;
      ASSERT_TRUE(succeeds(run(alone(), glu_args)));
      ASSERT_TRUE(succeeds(run(alone(), grad_args)));
      EXPECT_TRUE(same_bits(rows.data, copies[0][2].data));
      EXPECT_TRUE(grad_args.beta == 1 || same_bits(grad_bias[0], grad_bias[1]));
      EXPECT_TRUE(same_bits(columns.data, copies[0][1].data));
    }
  }
}

TEST_F(Fp8TensorCores, SumWeightGradientsAsTheReferenceDoes) {
  Random random;
  const Batch batch({170, 0, 300, 1, 257}, 9);
  for (const Fp8& a : {kBlock4, kBlock5, kMx4, kMx5}) {
    for (const Fp8& b : {kBlock4, kBlock5, kMx4}) {
      if (a.element == DType::kE5M2 && b.element == DType::kE5M2) continue;
      for (const DType output : {DType::kFP32, DType::kBF16}) {
        for (const int32_t beta : {0, 1}) {
          GemmOptions o = options(a, b, MOIRE_OUT_IN);
          o.output = output;
          o.beta = beta;
          check(WgradCase(random, batch, 144, 208, o));
        }
      }
    }
  }
}

// The case again, by a CPU that emulates FP8 tensor cores.
template <class Case>
Case emulated(const Case& c) {
  Case out = c;
  out.options.accumulation = MOIRE_ACCUMULATE_EMULATED;
  EXPECT_TRUE(succeeds(out.run(Context::create().value())));
  return out;
}

// Sums of five promotions, of which the last has 16 products. What an activation made of them is as
// exact as the device's sigmoid, so z is compared; grad_act is a product like any other.
TEST_F(Fp8TensorCores, HaveTheBitsOfTheirEmulation) {
  Random random;
  const Batch batch({70, 0, 129, 5}, 9);
  for_each_option([&](const GemmOptions& o) {
    for (const bool transpose_b : {false, true}) {
      GemmCase c(random, batch, 144, 528, transpose_b, o);
      const GemmCase want = emulated(c);
      ASSERT_TRUE(succeeds(c.run(alone())));
      EXPECT_TRUE(same_bits(c.d, want.d)) << "transpose_b " << transpose_b;
    }
    if (!o.extras) return;  // without z
    GemmGluCase c(random, batch, 80, 144, o);
    const GemmGluCase want = emulated(c);
    ASSERT_TRUE(succeeds(c.run(alone())));
    EXPECT_TRUE(same_bits(c.z, want.z, batch.rows()));
  });
}

TEST_F(Fp8TensorCores, SumWeightGradientsToTheBitsOfTheirEmulation) {
  Random random;
  const Batch batch({170, 0, 300, 1, 257}, 9);
  for (const Fp8& a : {kBlock4, kBlock5, kMx4, kMx5}) {
    for (const Fp8& b : {kBlock4, kMx4}) {
      for (const DType output : {DType::kFP32, DType::kBF16}) {
        GemmOptions o = options(a, b, MOIRE_OUT_IN);
        o.output = output;
        o.beta = output == DType::kFP32 ? 1 : 0;
        SCOPED_TRACE(testing::Message() << o);
        WgradCase c(random, batch, 144, 208, o);
        const WgradCase want = emulated(c);
        ASSERT_TRUE(succeeds(c.run(alone())));
        EXPECT_TRUE(same_bits(c.d, want.d));
      }
    }
  }
}

// Blocks of 32 whose codes lie up to 40 apart: 32 leave E5M2's largest elements above zero.
TEST_F(Fp8TensorCores, FoldBlocksHoweverFarApartTheyLie) {
  Random random;
  const Batch batch({170, 0, 300, 1, 257}, 9);
  const auto spread = [&](TestTensor& scales) {
    const TensorView view = scales;
    for (int64_t row = 0; row < view.num_rows(); ++row) {
      for (int64_t column = 0; column < view.columns(); ++column) {
        scales.as<uint8_t>()[row * view.stride() + column] =
            static_cast<uint8_t>(127 - random.integer(0, 40));
      }
    }
  };
  for (const Fp8& a : {kMx4, kMx5}) {
    const GemmOptions o = options(a, kMx4, MOIRE_OUT_IN);
    SCOPED_TRACE(testing::Message() << o);
    GemmCase c(random, batch, 144, 528, false, o);
    spread(c.a.scales);
    const GemmCase product = emulated(c);
    ASSERT_TRUE(succeeds(c.run(alone())));
    EXPECT_TRUE(same_bits(c.d, product.d));
    WgradCase w(random, batch, 144, 208, o);
    spread(w.a.scales);
    spread(w.b.scales);
    const WgradCase gradient = emulated(w);
    ASSERT_TRUE(succeeds(w.run(alone())));
    EXPECT_TRUE(same_bits(w.d, gradient.d));
  }
}

// Blocks with the code 0, of zeros and of numbers, beside scales so large that the numbers are
// seen.
TEST_F(Fp8TensorCores, FoldBlocksOfTheLeastCode) {
  Random random;
  const Batch batch({170, 0, 300, 1, 257}, 9);
  const auto fill = [](const TensorView& scales, uint8_t code) {
    std::fill_n(static_cast<uint8_t*>(scales.data), scales.num_rows() * scales.stride(), code);
  };
  const auto zero_where = [](const TensorView& codes, auto is_zero) {
    for (int64_t row = 0; row < codes.num_rows(); ++row) {
      for (int64_t column = 0; column < codes.columns(); ++column) {
        if (!is_zero(row, column)) continue;
        static_cast<uint8_t*>(codes.data)[row * codes.stride() + column] = 0x80;
      }
    }
  };
  for (const Fp8& a : {kMx4, kMx5}) {
    const GemmOptions o = options(a, kMx4, MOIRE_OUT_IN);
    SCOPED_TRACE(testing::Message() << o);
    GemmCase c(random, batch, 144, 528, false, o);
    fill(c.args().a_scales, 0);
    fill(c.args().b_scales, 230);
    zero_where(c.args().a, [](int64_t row, int64_t column) {
      return row % 5 == 0 || (row % 3 == 0 && column / 128 == 1);
    });
    const GemmCase product = emulated(c);
    ASSERT_TRUE(succeeds(c.run(alone())));
    EXPECT_TRUE(same_bits(c.d, product.d));
    WgradCase w(random, batch, 144, 208, o);
    fill(w.args().a_scales, 0);
    fill(w.args().b_scales, 230);
    zero_where(w.args().a, [](int64_t row, int64_t column) {
      return column % 5 == 0 || (column % 3 == 0 && row < 170);
    });
    const WgradCase gradient = emulated(w);
    ASSERT_TRUE(succeeds(w.run(alone())));
    EXPECT_TRUE(same_bits(w.d, gradient.d));
  }
}

// 192 of 1024 columns by themselves lie otherwise on tiles and blocks: the same bits.
TEST_F(Fp8TensorCores, GiveAColumnTheSameBitsHoweverWideItsMatrixIs) {
  constexpr int64_t kWide = 1024, kNarrow = 192, kRows = 700, kK = 640;
  Random random;
  const Batch batch({kRows, 0, 77}, 0);
  GemmCase c(random, batch, kWide, kK, false, options(kBlock4, kBlock4, MOIRE_OUT_IN));
  GemmCase narrow(random, batch, kNarrow, kK, false, options(kBlock4, kBlock4, MOIRE_OUT_IN));
  GroupedGemmArgs wide_args = c.args(), args = narrow.args();
  args.a = wide_args.a, args.a_scales = wide_args.a_scales;
  args.bias = args.bias_scale = wide_args.bias = wide_args.bias_scale = {};
  // The first columns of each group's weight, copied.
  const TensorView from(wide_args.b.tensor), to(args.b.tensor);
  const TensorView from_scales(wide_args.b_scales), to_scales(args.b_scales);
  for (int64_t g = 0; g < batch.num_groups(); ++g) {
    for (int64_t i = 0; i < kNarrow; ++i) {
      std::copy_n(static_cast<const uint8_t*>(from.data) + (g * kWide + i) * from.stride(), kK,
                  static_cast<uint8_t*>(to.data) + (g * kNarrow + i) * to.stride());
    }
    for (int64_t i = 0; i < to_scales.shape[1]; ++i) {
      std::copy_n(
          static_cast<const float*>(from_scales.data) +
              (g * from_scales.shape[1] + i) * from_scales.stride(),
          to_scales.columns(),
          static_cast<float*>(to_scales.data) + (g * to_scales.shape[1] + i) * to_scales.stride());
    }
  }
  ASSERT_TRUE(succeeds(run(alone(), wide_args)));
  ASSERT_TRUE(succeeds(run(alone(), args)));
  int64_t different = 0;
  for (int64_t row = 0; row < batch.rows(); ++row) {
    for (int64_t i = 0; i < kNarrow; ++i) different += c.d.get(row, i) != narrow.d.get(row, i);
  }
  EXPECT_EQ(different, 0);
}

// Codes that are small integers, and scales that are powers of two: every sum is exact.
void fill_exactly(const TensorView& codes, const TensorView& scales, int64_t salt) {
  constexpr uint8_t kNumbers[] = {0x00, 0x38, 0xB8, 0x40, 0xC0};  // 0, 1, -1, 2, -2
  for (int64_t i = 0; i < codes.num_rows() * codes.stride(); ++i) {
    static_cast<uint8_t*>(codes.data)[i] = kNumbers[(i * 7 + i / 13 + salt) % 5];
  }
  for (int64_t i = 0; i < scales.num_rows() * scales.stride(); ++i) {
    static_cast<float*>(scales.data)[i] = static_cast<float>(1 << (i * 3 + salt) % 4);
  }
}

// Of one to four steps and six, where rings have three stages or four, and of more.
constexpr int64_t kDepths[] = {96, 144, 290, 420, 700, 1300};

Batch many_tiles(int64_t rows_of_group) {
  std::vector<int64_t> splits(40, rows_of_group);
  splits[7] = splits[39] = 0;
  return Batch(splits, 1000);
}

TEST_F(Fp8TensorCores, AreExactOnManyTiles) {
  Random random;
  GemmOptions o = options(kBlock4, kBlock4, MOIRE_OUT_IN);
  o.extras = false;
  for (const int64_t k : kDepths) {
    const Batch batch = many_tiles(290), deep = many_tiles(k);
    for (const int64_t n : {768, 512}) {
      for (const bool transpose_b : {false, true}) {
        GemmCase c(random, batch, n, k - k % 16, transpose_b, o);
        fill_exactly(c.args().a, c.args().a_scales, 1);
        fill_exactly(c.args().b.tensor, c.args().b_scales, 2);
        GemmCase exact = c;
        exact.options.accumulation = MOIRE_ACCUMULATE_EXACT;
        ASSERT_TRUE(succeeds(c.run(alone())));
        ASSERT_TRUE(succeeds(exact.run(Context::create().value())));
        EXPECT_TRUE(same_bits(c.d, exact.d))
            << "n " << n << " k " << k << " transpose_b " << transpose_b;
      }
    }
    for (const int32_t beta : {0, 1}) {
      o.output = DType::kFP32;
      o.beta = beta;
      WgradCase c(random, deep, 256, 272, o);
      fill_exactly(c.args().a, c.args().a_scales, 1);
      fill_exactly(c.args().b, c.args().b_scales, 2);
      WgradCase exact = c;
      exact.options.accumulation = MOIRE_ACCUMULATE_EXACT;
      ASSERT_TRUE(succeeds(c.run(alone())));
      ASSERT_TRUE(succeeds(exact.run(Context::create().value())));
      EXPECT_TRUE(same_bits(c.d, exact.d)) << o << " rows " << k;
    }
    o.output = DType::kBF16;
    o.beta = 0;
  }
}

void scale_square(const TensorView& scales, int64_t first_row, int64_t end_row,
                  int64_t first_column, int64_t end_column, float by) {
  for (int64_t row = first_row; row < end_row; ++row) {
    for (int64_t i = first_column; i < end_column; ++i) {
      static_cast<float*>(scales.data)[row * scales.stride() + i] *= by;
    }
  }
}
void scale_rows(const TensorView& scales, int64_t first, int64_t end, float by) {
  scale_square(scales, first, end, 0, scales.columns(), by);
}
void scale_columns(const TensorView& scales, int64_t first, int64_t end, float by) {
  scale_square(scales, 0, scales.num_rows(), first, end, by);
}

// Scales whose products are no normal numbers, or that nobody would know for such, in some tiles of
// every block and not in others: still every sum is exact, and added to what is there but once.
TEST_F(Fp8TensorCores, SumTilesAgainThatNeedCare) {
  constexpr float kTiny = 0x1p-100F, kSmall = 0x1p-40F, kLarge = 0x1p80F;
  Random random;
  for (const int64_t k : kDepths) {
    const Batch batch = many_tiles(290), deep = many_tiles(k);
    GemmOptions o = options(kBlock4, kBlock4, MOIRE_OUT_IN);
    o.extras = false;
    GemmCase c(random, batch, 768, k - k % 16, false, o);
    const TensorView rows(c.args().a_scales), tiles(c.args().b_scales);
    fill_exactly(c.args().a, rows, 1);
    fill_exactly(c.args().b.tensor, tiles, 2);
    for (int64_t row = 0; row < batch.rows(); ++row) {
      const int64_t group = row / 290;  // but for the empty one
      if (group % 4 == 1) scale_rows(rows, row, row + 1, kTiny);
      if (group % 4 == 3) scale_rows(rows, row, row + 1, kLarge);
    }
    const int64_t tiles_of_group = tiles.num_rows() / batch.num_groups();
    for (int64_t group = 0; group < batch.num_groups(); group += 3) {
      scale_rows(tiles, group * tiles_of_group, (group + 1) * tiles_of_group, kSmall);
    }
    GemmCase exact = c;
    exact.options.accumulation = MOIRE_ACCUMULATE_EXACT;
    ASSERT_TRUE(succeeds(exact.run(Context::create().value())));
    ASSERT_TRUE(succeeds(c.run(alone())));
    EXPECT_TRUE(same_bits(c.d, exact.d)) << "k " << k;

    for (const DType output : {DType::kFP32, DType::kBF16}) {
      for (const int adding : {0, 1, 2}) {  // to no group, to all, to some
        o.output = output;
        o.beta = adding != 0;
        WgradCase w(random, deep, 512, 640, o);
        const TensorView of_a(w.args().a_scales), of_b(w.args().b_scales);
        fill_exactly(w.args().a, of_a, 1);
        fill_exactly(w.args().b, of_b, 2);
        if (adding == 2) {
          for (int i = 0; i < 40; ++i) w.beta_per_group.push_back(i % 3 != 0);
        }
        scale_columns(of_a, 200, 210, kTiny);
        scale_columns(of_b, 0, 100, kSmall);
        scale_columns(of_b, 500, 600, kLarge);
        WgradCase want = w;
        want.options.accumulation = MOIRE_ACCUMULATE_EXACT;
        ASSERT_TRUE(succeeds(want.run(Context::create().value())));
        ASSERT_TRUE(succeeds(w.run(alone())));
        EXPECT_TRUE(same_bits(w.d, want.d)) << o << " rows " << k << " adding " << adding;
      }
    }
  }
}

TEST_F(Fp8TensorCores, AreOnlyUsedWhereTheirSumsAreAllowed) {
  Random random;
  const Batch batch({70, 60});
  for (const Fp8& format : {kBlock4, kMx4}) {
    GemmOptions o = options(format, format, MOIRE_OUT_IN);
    o.accumulation = MOIRE_ACCUMULATE_EXACT;
    GemmCase c(random, batch, 128, 128, false, o);
    EXPECT_FALSE(policy(c.args()).starts_with("FP8 tensor cores"));
  }
}

}  // namespace
}  // namespace moire::test
