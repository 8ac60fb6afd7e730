// Results that must be equal to the last bit: any number of threads, any instruction set, run
// twice, packed or listed, gathered or permuted before, fused or op by op.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cpu/simd_targets.h"
#include "tests/backend/each_target.h"
#include "tests/support/grouped_gemm_cases.h"

namespace moire::test {
namespace {

GemmOptions options(int32_t layout, DType dtype) {
  GemmOptions o;
  o.layout = layout;
  o.operands = o.output = dtype;
  return o;
}

TEST(GroupedGemmBits, DoNotDependOnTheNumberOfThreads) {
  Random random;
  const Batch batch({3, 0, 140, 21}, 2);
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    for (const DType dtype : {DType::kFP32, DType::kBF16}) {
      const EveryGemm fresh(random, batch, options(layout, dtype));
      EveryGemm one = fresh;
      one.run(cpu(1));
      for (const int threads : {1, 2, 3, 7}) {
        SCOPED_TRACE(threads);
        EveryGemm other = fresh;
        other.run(cpu(threads));
        other.expect_same(one);
      }
    }
  }
}

TEST(GroupedGemmBits, DoNotDependOnTheInstructionSet) {
  Random random;
  const Batch batch({3, 0, 70}, 2);
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    const EveryGemm fresh(random, batch, options(layout, DType::kFP32));
    EveryGemm best = fresh;
    best.run(cpu(2));
    cpu::for_each_target([&] {
      EveryGemm other = fresh;
      other.run(cpu(2));
      other.expect_same(best);
    });
  }
}

// NaN of both signs, with payloads, where they meet each other in one sum.
void spoil(EveryGemm& ops) {
  constexpr uint32_t kNans[] = {0x7FC00001, 0xFFC00002, 0x7F800003, 0xFFFFFFFF};
  for (TestTensor* t : {&ops.forward.a.rows, &ops.dgrad.a.rows, &ops.glu.a.rows,
                        &ops.glu_backward.grad_y.rows, &ops.wgrad.a.rows, &ops.wgrad.b.rows}) {
    const TensorView view = *t;
    for (int64_t i = 0; i < 40; ++i) {
      const int64_t row = i * 7 % view.num_rows(), column = i * 11 % view.columns();
      t->as<uint32_t>()[row * view.stride() + column] = kNans[i % 4];
    }
  }
}

// FP32 results whose NaN are one.
TestTensor with_one_nan(TestTensor t) {
  const TensorView view = t;
  if (view.type() != DType::kFP32) return t;
  for (int64_t row = 0; row < view.num_rows(); ++row) {
    float* const values = t.as<float>() + row * view.stride();
    std::replace_if(
        values, values + view.columns(), [](float v) { return std::isnan(v); },
        std::numeric_limits<float>::quiet_NaN());
  }
  return t;
}

// docs/numerics.md: which NaN an FP32 result is, is not promised; that it is one is, and the bits
// of a narrower type's.
void expect_same_but_for_nan(const EveryGemm& got, const EveryGemm& want) {
  const auto same = [](const TestTensor& a, const TestTensor& b) {
    return same_bits(with_one_nan(a), with_one_nan(b));
  };
  EXPECT_TRUE(same(got.forward.d, want.forward.d));
  EXPECT_TRUE(same(got.dgrad.d, want.dgrad.d));
  EXPECT_TRUE(same(got.glu.act, want.glu.act));
  EXPECT_TRUE(same(got.glu_backward.grad_z, want.glu_backward.grad_z));
  EXPECT_TRUE(same(got.glu_backward.grad_probs, want.glu_backward.grad_probs));
}

TEST(GroupedGemmBits, AreTheSameButForWhichNanAnFp32Is) {
  Random random;
  const Batch batch({3, 0, 70}, 2);
  for (const DType output : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    SCOPED_TRACE(dtype_name(output));
    GemmOptions o = options(MOIRE_OUT_IN, DType::kFP32);
    o.output = output;
    EveryGemm fresh(random, batch, o);
    spoil(fresh);
    EveryGemm one = fresh;
    one.run(cpu(1));
    EXPECT_FALSE(same_bits(one.forward.d, fresh.forward.d));
    EveryGemm three = fresh;
    three.run(cpu(3));
    expect_same_but_for_nan(three, one);
    cpu::for_each_target([&] {
      EveryGemm other = fresh;
      other.run(cpu(2));
      expect_same_but_for_nan(other, one);
    });
  }
}

TEST(GroupedGemmBits, OfAListAreThoseOfThePackedWeight) {
  Random random;
  const Batch batch({9, 30});
  GemmOptions o;
  o.listed = true;
  GemmCase listed(random, batch, 70, 90, false, o);
  o.listed = false;
  GemmCase packed(random, batch, 70, 90, false, o);
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t i = 0; i < 70; ++i) {
      for (int64_t j = 0; j < 90; ++j) packed.b.set(g, i, j, listed.b.get(g, i, j));
    }
  }
  packed.a = listed.a;
  packed.bias = listed.bias;
  packed.bias_scale = listed.bias_scale;
  ASSERT_TRUE(succeeds(listed.run(cpu(2))));
  ASSERT_TRUE(succeeds(packed.run(cpu(2))));
  listed.expect_same(packed);
}

TEST(GroupedGemmBits, OfGatheredRowsAreThoseOfPermutedRows) {
  Random random;
  const Batch batch({9, 30});
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    GemmOptions o = options(layout, DType::kBF16);
    o.row_idx = DType::kInt32;
    GemmCase gathered(random, batch, 70, 90, false, o);
    GemmCase permuted = gathered;
    permuted.a.rows = TestTensor(DType::kBF16, {batch.capacity(), 90});
    permuted.a.row_idx = {};
    for (int64_t i = 0; i < batch.rows(); ++i) {
      const int32_t source = gathered.a.row_idx.as<int32_t>()[i];
      for (int64_t k = 0; k < 90; ++k) {
        permuted.a.rows.set(i, k, gathered.a.rows.get(source, k));
      }
    }
    ASSERT_TRUE(succeeds(gathered.run(cpu(2))));
    ASSERT_TRUE(succeeds(permuted.run(cpu(2))));
    gathered.expect_same(permuted);
  }
}

GluArgs unfused_glu(const GemmGluCase& c, const TestTensor& z, const TestTensor& act) {
  GluArgs args;
  args.z = z;
  args.probs = c.probs;
  args.act = act;
  args.groups = c.batch.groups();
  args.activation = c.options.activation;
  args.layout = c.options.glu;
  return args;
}

TEST(GroupedGemmBits, OfTheFusedActivationAreThoseOfTheOpsOneByOne) {
  Random random;
  const Context context = cpu(2);
  const Batch batch({17, 0, 40}, 1);
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    for (const GluLayout& glu_layout : {GluLayout::halves(), GluLayout::interleaved(1),
                                        GluLayout::interleaved(15), GluLayout::ungated()}) {
      GemmOptions o = options(layout, DType::kBF16);
      o.glu = glu_layout;
      GemmGluCase fused(random, batch, 150, 300, o);
      ASSERT_TRUE(succeeds(fused.run(context)));
      TestTensor z(DType::kBF16, {batch.capacity(), 150 * o.halves()}),
          act(DType::kBF16, {batch.capacity(), 150});
      GroupedGemmArgs gemm;
      gemm.a = fused.a.rows;
      gemm.b = fused.b;
      gemm.bias = fused.bias;
      gemm.d = z;
      gemm.groups = batch.groups();
      ASSERT_TRUE(succeeds(run(context, gemm)));
      ASSERT_TRUE(succeeds(glu(context, unfused_glu(fused, z, act))));
      EXPECT_TRUE(same_bits(fused.z, z, batch.rows()));
      EXPECT_TRUE(same_bits(fused.act, act));
    }
  }
}

GluBackwardArgs unfused_backward(const GemmGluBackwardCase& c, const TestTensor& grad_act,
                                 const GemmGluBackwardCase& out) {
  GluBackwardArgs args;
  args.z = c.z;
  args.probs = c.probs;
  args.grad_act = grad_act;
  args.grad_z = out.grad_z;
  args.act = out.act;
  args.grad_probs = out.grad_probs;
  args.groups = c.batch.groups();
  args.activation = c.options.activation;
  args.layout = c.options.glu;
  return args;
}

TEST(GroupedGemmBits, OfTheFusedBackwardAreThoseOfTheOpsOneByOne) {
  Random random;
  const Context context = cpu(2);
  const Batch batch({17, 0, 130}, 1);
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    GemmOptions o = options(layout, DType::kBF16);
    o.beta = layout;
    GemmGluBackwardCase fused(random, batch, 150, 300, o);
    GemmGluBackwardCase unfused = fused;
    ASSERT_TRUE(succeeds(fused.run(context)));
    TestTensor grad_act(DType::kBF16, {batch.capacity(), 150});
    GroupedGemmArgs gemm;
    gemm.a = fused.grad_y.rows;
    gemm.b = fused.w2;
    gemm.transpose_b = 1;
    gemm.d = grad_act;
    gemm.groups = batch.groups();
    ASSERT_TRUE(succeeds(run(context, gemm)));
    ASSERT_TRUE(succeeds(glu_backward(context, unfused_backward(fused, grad_act, unfused))));
    BiasBackwardArgs bias;
    bias.grad_y = unfused.grad_z;
    bias.grad_bias = unfused.grad_bias;
    bias.beta = o.beta;
    bias.groups = batch.groups();
    ASSERT_TRUE(succeeds(run(context, bias)));
    fused.expect_same(unfused);
  }
}

}  // namespace
}  // namespace moire::test
