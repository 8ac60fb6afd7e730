// MXFP8 weights that Hopper's kernel decodes on their way to registers: the bits of the product of
// weights that were decoded before, and what the reference has; every code beside every scale; the
// copies that an activation beside such a product makes in one pass.
#include <string>
#include <vector>

#include "tests/gpu/gpu.h"
#include "tests/ops/quantize_support.h"
#include "tests/support/expect.h"
#include "tests/support/grouped_gemm_cases.h"
#include "tests/support/tested.h"

namespace moire::test {
namespace {

constexpr Fp8 kMx{DType::kE4M3, DType::kE8M0};
constexpr const char* kInside = "weight decoded in registers";

class DecodedWeights : public Hopper {};

GemmOptions options(int32_t layout) {
  GemmOptions o;
  o.operands = o.output = DType::kBF16;
  o.b = kMx;
  o.layout = layout;
  return o;
}

// Scales in rows so far apart; the kernel takes even distances.
TestTensor with_stride(const TensorView& scales, int64_t stride) {
  TestTensor copy(DType::kE8M0, {scales.shape[0], scales.shape[1], scales.shape[2]},
                  stride - scales.columns());
  const TensorView to = copy.view();
  for (int64_t row = 0; row < scales.num_rows(); ++row) {
    std::copy_n(static_cast<const uint8_t*>(scales.data) + row * scales.stride(), scales.columns(),
                static_cast<uint8_t*>(to.data) + row * to.stride());
  }
  return copy;
}

// The call with its weight decoded inside the kernel, and before it.
struct BothWays {
  explicit BothWays(const GroupedGemmArgs& args)
      : inside(args),
        before(args),
        even(with_stride(args.b_scales, round_up(TensorView(args.b_scales).columns(), 2))),
        odd(with_stride(args.b_scales, round_up(TensorView(args.b_scales).columns(), 2) + 1)),
        d(DType::kBF16, {TensorView(args.d).num_rows(), TensorView(args.d).columns()}) {
    inside.b_scales = even;
    before.b_scales = odd;
    before.d = d;
  }
  GroupedGemmArgs inside, before;
  TestTensor even, odd, d;
};

// Rows in tiles of every height, one more or less than a block of 64 has; columns and K that end
// within a tile, a stage, a block of scales.
TEST_F(DecodedWeights, GiveTheBitsOfWeightsDecodedBefore) {
  struct Sizes {
    int64_t n, k;
  };
  Random random;
  const Batch batch({70, 0, 129, 5, 300, 577, 64, 193, 1}, 9);
  int variant = 0;
  for (const Sizes& s : {Sizes{208, 432}, Sizes{64, 32}, Sizes{336, 64}, Sizes{16, 976}}) {
    for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
      for (const bool transpose_b : {false, true}) {
        GemmOptions o = options(layout);
        o.row_idx = variant % 3 == 0 ? DType::kInt32 : DType::kNone;
        o.extras = variant % 4 != 3;
        o.tail = variant % 2 == 0 ? MOIRE_TAIL_ZERO : MOIRE_TAIL_UNTOUCHED;
        ++variant;
        const GemmCase c(random, batch, s.n, s.k, transpose_b, o);
        SCOPED_TRACE(testing::Message() << o << c.variant() << ", n " << s.n << ", k " << s.k);
        const BothWays both(c.args());
        EXPECT_TRUE(policy(both.inside).starts_with(kInside)) << policy(both.inside);
        EXPECT_NE(policy(both.before).find("after decoding b"), std::string::npos);
        const auto want = reference::truth(both.inside);
        ASSERT_TRUE(succeeds(run(alone(), both.inside)));
        ASSERT_TRUE(succeeds(run(alone(), both.before)));
        EXPECT_TRUE(outputs_match(both.inside, want));
        EXPECT_TRUE(c.is_undamaged());
        EXPECT_TRUE(same_bits(c.d, both.d, batch.rows()));
      }
    }
  }
}

// A column for each code beside each scale, with nothing else in it that would hide them.
TEST_F(DecodedWeights, AreEveryCodeTimesEveryScale) {
  constexpr int64_t kN = 256 * 256, kK = 32;
  Random random;
  const Batch batch({1}, 0);
  for (const bool transpose_b : {false, true}) {
    GemmOptions o = options(MOIRE_OUT_IN);
    o.extras = false;
    GemmCase c(random, batch, kN, kK, transpose_b, o);
    c.a.rows.fill(1);
    const GroupedGemmArgs args = c.args();
    const TensorView codes(args.b.tensor), scales(args.b_scales);
    std::fill_n(static_cast<uint8_t*>(codes.data), codes.num_rows() * codes.stride(), uint8_t{0});
    for (int64_t n = 0; n < kN; ++n) {
      const int64_t k = n % kK;
      static_cast<uint8_t*>(
          codes.data)[transpose_b ? k * codes.stride() + n : n * codes.stride() + k] =
          static_cast<uint8_t>(n % 256);
      static_cast<uint8_t*>(scales.data)[transpose_b ? n : n * scales.stride()] =
          static_cast<uint8_t>(n / 256);
    }
    const BothWays both(args);
    EXPECT_TRUE(policy(both.inside).starts_with(kInside)) << policy(both.inside);
    ASSERT_TRUE(succeeds(run(alone(), both.inside)));
    ASSERT_TRUE(succeeds(run(alone(), both.before)));
    EXPECT_TRUE(same_bits(c.d, both.d)) << "transpose_b " << transpose_b;
    // 448 * 2^0 at the least, so that both are not merely empty.
    EXPECT_EQ(c.d.get(0, 127 * 256 + 0x7E), 448.0);
  }
}

TEST_F(DecodedWeights, OfManyTilesAreThoseOfTheirGroup) {
  Random random;
  std::vector<int64_t> splits;
  for (int i = 0; i < 48; ++i) splits.push_back(i % 7 == 3 ? 0 : 40 + 61 * (i % 9));
  const Batch batch(splits, 1000);
  for (const int64_t n : {768, 528}) {
    for (const bool transpose_b : {false, true}) {
      const GemmCase c(random, batch, n, 1040, transpose_b, options(MOIRE_OUT_IN));
      const BothWays both(c.args());
      ASSERT_TRUE(succeeds(run(alone(), both.inside)));
      ASSERT_TRUE(succeeds(run(alone(), both.before)));
      EXPECT_TRUE(same_bits(c.d, both.d)) << "n " << n << " transpose_b " << transpose_b;
    }
  }
}

// F, and how gate and up lie.
struct Lying {
  int64_t f;
  GluLayout glu;
};
const Lying kLayouts[] = {{256, GluLayout::halves()},
                          {192, moire_glu_layout{0, MOIRE_UP_FIRST}},
                          {512, GluLayout::interleaved(256)},
                          {288, GluLayout::halves()},
                          {96, GluLayout::halves()},  // two passes backward
                          {256, GluLayout::interleaved(128, MOIRE_UP_FIRST)},
                          {240, GluLayout::interleaved(8)},
                          {160, GluLayout::interleaved(32, MOIRE_UP_FIRST)},
                          {80, GluLayout::interleaved(1)},
                          {208, GluLayout::ungated()}};
const Activation kActivations[] = {Activation::swiglu(), Activation::clamped_swiglu(),
                                   Activation::geglu_tanh(), Activation::reglu(),
                                   Activation::reglu2()};

// A copy as values.
TestTensor values(const Batch& batch, int64_t columns) {
  return TestTensor(DType::kBF16, {batch.capacity(), columns});
}
moire_quantized as_values(const TestTensor& t) { return Quantized{t, {}}; }

// Where values alone are asked for the activation makes them; beside what they are values of they
// are made behind it. Some rows are so small that a block is left to the careful way.
TEST_F(DecodedWeights, LeaveTheActivationToQuantiseInOnePass) {
  Random random;
  const Batch batch({70, 0, 129, 256, 5}, 9);
  int variant = 0;
  for (const auto& [f, glu] : kLayouts) {
    for (const Activation& activation : kActivations) {
      GemmOptions o = options(MOIRE_OUT_IN);
      o.glu = glu;
      o.activation = activation;
      o.tail = variant++ % 2 == 0 ? MOIRE_TAIL_ZERO : MOIRE_TAIL_UNTOUCHED;
      SCOPED_TRACE(testing::Message() << o << ", F " << f);
      GemmGluCase forward(random, batch, f, 192, o);
      GemmGluBackwardCase backward(random, batch, f, 192, o);
      for (int64_t row = 40; row < 75; ++row) {
        for (int64_t i = 0; i < 192; ++i) {
          backward.grad_y.rows.set(row, i, 0x1p-121 * static_cast<double>(1 + i % 3));
        }
      }
      GroupedGemmGluArgs glu_args = forward.args();
      GroupedGemmGluBackwardArgs grad_args = backward.args();
      TestTensor copies[2][5], grad_probs[2], grad_bias[2];
      const bool has_bias = variant % 3 != 0;
      grad_args.beta = variant % 2;
      for (int one_pass = 0; one_pass < 2; ++one_pass) {
        TestTensor* const c = copies[one_pass];
        c[0] = values(batch, f), c[1] = values(batch, o.halves() * f);
        c[2] = values(batch, o.halves() * f), c[3] = values(batch, f), c[4] = values(batch, f);
        glu_args.act_rowwise = as_values(c[0]);
        glu_args.act_columnwise = as_values(c[4]);
        grad_args.grad_z_rowwise = as_values(c[1]);
        grad_args.grad_z_columnwise = as_values(c[2]);
        grad_args.act_columnwise = as_values(c[3]);
        grad_args.grad_probs = grad_probs[one_pass] = TestTensor(DType::kFP32, {batch.capacity()});
        grad_bias[one_pass] = TestTensor(DType::kFP32, {5, o.halves() * f});
        for (int64_t i = 0; i < 5 * o.halves() * f; ++i) grad_bias[one_pass].as<float>()[i] = 0.5F;
        grad_args.grad_bias = has_bias ? grad_bias[one_pass].view() : TensorView();
        if (one_pass == 1) glu_args.act = grad_args.act = grad_args.grad_z = {};
        const bool takes_backward = !(f == 96 && glu.block == 0);
        EXPECT_EQ(policy(glu_args).find("in the same pass") != std::string::npos, one_pass == 1);
        EXPECT_EQ(policy(grad_args).find("in the same pass") != std::string::npos,
                  one_pass == 1 && takes_backward)
            << policy(grad_args);
        ASSERT_TRUE(succeeds(run(alone(), glu_args)));
        ASSERT_TRUE(succeeds(run(alone(), grad_args)));
      }
      const int64_t rows = o.tail == MOIRE_TAIL_ZERO ? batch.capacity() : batch.rows();
      for (int i = 0; i < 5; ++i) {
        EXPECT_TRUE(same_bits(copies[0][i], copies[1][i], rows)) << "copy " << i;
        EXPECT_TRUE(copies[1][i].is_undamaged()) << "copy " << i;
      }
      EXPECT_TRUE(same_bits(grad_probs[0], grad_probs[1], rows));
      EXPECT_TRUE(same_bits(grad_bias[0], grad_bias[1]));
      EXPECT_TRUE(grad_bias[1].is_undamaged());
      // One of each alone.
      const TestTensor alone_of_z = values(batch, o.halves() * f), alone_of_act = values(batch, f);
      grad_args.grad_z_rowwise = as_values(alone_of_z);
      grad_args.grad_z_columnwise = grad_args.act_columnwise = glu_args.act_rowwise = {};
      ASSERT_TRUE(succeeds(run(alone(), grad_args)));
      EXPECT_TRUE(same_bits(alone_of_z, copies[0][1], rows));
      glu_args.act_columnwise = as_values(alone_of_act);
      ASSERT_TRUE(succeeds(run(alone(), glu_args)));
      EXPECT_TRUE(same_bits(alone_of_act, copies[0][4], rows));
    }
  }
}

}  // namespace
}  // namespace moire::test
