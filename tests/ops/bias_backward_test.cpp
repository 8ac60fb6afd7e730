// bias_backward against the reference, and its order of summation against a scalar loop.
#include <gtest/gtest.h>
#include <moire/grouped_gemm.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "reference/grouped_gemm.h"
#include "tests/support/documented_order.h"
#include "tests/support/outputs.h"
#include "tests/support/ragged.h"

namespace moire::test {
namespace {

constexpr DType kDTypes[] = {DType::kFP32, DType::kBF16, DType::kFP16};

// Everything that a call can have; gathered: grad_y has more rows, in another order.
struct Case {
  Case(const Batch& b, int64_t n, DType dtype, DType out, bool gathered = false,
       int64_t padding = 3)
      : batch(b),
        grad_y(dtype, {gathered ? b.capacity() + 5 : b.capacity(), n}, padding),
        scale(DType::kFP32, {b.capacity()}),
        bias(dtype, {b.num_groups(), n}, 1),
        grad_bias(out, {b.num_groups(), n}, 2),
        grad_scale(DType::kFP32, {b.capacity()}) {
    if (gathered) {
      grad_y.randomize(random);
      std::vector<int64_t> rows(static_cast<size_t>(b.capacity()), -1);
      for (int64_t i = 0; i < b.rows(); ++i) {
        rows[static_cast<size_t>(i)] = random.integer(0, b.capacity() + 4);
      }
      row_idx = index_tensor(DType::kInt32, rows);
    } else {
      grad_y.randomize_rows(random, b.rows());
    }
    scale.randomize(random);
    bias.randomize(random);
    args.grad_y = grad_y;
    args.row_idx = row_idx;
    args.scale = scale;
    args.bias = bias;
    args.grad_bias = grad_bias;
    args.grad_scale = grad_scale;
    args.groups = b.groups();
  }
  Status run_on(const Tested& context) { return run(context, args); }
  void expect_right(const Tested& context) {
    test::expect_right(context, args);
    EXPECT_TRUE(grad_bias.is_undamaged() && grad_scale.is_undamaged());
  }

  const Batch& batch;
  Random random;
  TestTensor grad_y, row_idx, scale, bias, grad_bias, grad_scale;
  BiasBackwardArgs args;
};

class BiasBackward : public testing::TestWithParam<RaggedCase> {};

TEST_P(BiasBackward, OverwritesWhateverTheTypes) {
  const Batch batch(GetParam());
  for (const DType dtype : kDTypes) {
    for (const DType out : kDTypes) {
      Case c(batch, 33, dtype, out);
      c.expect_right(tested(2));
    }
  }
}

TEST_P(BiasBackward, AccumulatesWhereBetaSaysSo) {
  const Batch batch(GetParam());
  for (const bool per_group : {false, true}) {
    Case c(batch, 70, DType::kBF16, per_group ? DType::kBF16 : DType::kFP32, true);
    std::vector<uint8_t> beta(static_cast<size_t>(batch.num_groups()) + 1);
    for (uint8_t& b : beta) b = static_cast<uint8_t>(c.random.integer(0, 1));
    c.args.beta = 1;
    if (per_group) c.args.beta_per_group = beta.data();
    for (int64_t g = 0; g < batch.num_groups(); ++g) {
      // What is overwritten stays poisoned until then.
      if (per_group && beta[static_cast<size_t>(g)] == 0) continue;
      for (int64_t j = 0; j < 70; ++j) c.grad_bias.set(g, j, 0.125 * static_cast<double>(j - 30));
    }
    c.expect_right(tested());
  }
}

TEST_P(BiasBackward, TakesRowsThatLieInVectors) {
  const Batch batch(GetParam());
  for (const DType dtype : kDTypes) {
    for (const bool gathered : {false, true}) {
      Case c(batch, 72, dtype, DType::kFP32, gathered, 0);
      c.expect_right(tested());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, BiasBackward, testing::ValuesIn(ragged_table()), case_name);

// On a GPU a block takes 4096 columns of 16-bit elements, 2048 of FP32, and 512 of elements that do
// not lie in vectors.
TEST(BiasBackwardParts, OfWideRowsAreSeveralBlocks) {
  struct Shape {
    DType dtype;
    int64_t n, padding;
  };
  const Batch batch({77, 0, 5}, 2);
  for (const Shape& s :
       {Shape{DType::kBF16, 4104, 0}, Shape{DType::kFP16, 8200, 0}, Shape{DType::kFP32, 2056, 0},
        Shape{DType::kBF16, 520, 3}, Shape{DType::kFP32, 1030, 3}}) {
    for (const bool gathered : {false, true}) {
      SCOPED_TRACE(testing::Message() << dtype_name(s.dtype) << ", " << s.n << " columns, padding "
                                      << s.padding << ", gathered " << gathered);
      Case c(batch, s.n, s.dtype, gathered ? s.dtype : DType::kFP32, gathered, s.padding);
      c.expect_right(tested());
      const TestTensor grad_bias = c.grad_bias, grad_scale = c.grad_scale;
      const BiasBackwardArgs whole = c.args;
      c.grad_bias.poison();
      c.grad_scale.poison();
      c.args.grad_scale = c.args.bias = {};
      ASSERT_TRUE(succeeds(c.run_on(tested())));
      EXPECT_TRUE(same_bits(c.grad_bias, grad_bias));
      c.args = whole;
      c.args.grad_bias = c.args.scale = {};
      ASSERT_TRUE(succeeds(c.run_on(tested())));
      EXPECT_TRUE(same_bits(c.grad_scale, grad_scale));
    }
  }
}

TEST(BiasBackwardScale, IsAddedToWhatIsThereAndItsTailIsStillZeroed) {
  const Batch batch({5, 0, 70}, /*tail=*/3);
  Case c(batch, 33, DType::kBF16, DType::kFP32);
  ASSERT_TRUE(succeeds(c.run_on(tested())));
  std::vector<float> dots(static_cast<size_t>(batch.rows()));
  for (int64_t i = 0; i < batch.rows(); ++i) {
    dots[static_cast<size_t>(i)] = static_cast<float>(c.grad_scale.get(0, i));
    c.grad_scale.set(0, i, 0.375);
  }
  c.args.beta_scale = 1;
  ASSERT_TRUE(succeeds(c.run_on(tested(3))));
  for (int64_t i = 0; i < batch.rows(); ++i) {
    ASSERT_EQ(c.grad_scale.get(0, i), 0.375F + dots[static_cast<size_t>(i)]) << "row " << i;
  }
  EXPECT_TRUE(tail_is_zero(c.grad_scale, batch.groups()));
  c.args.beta_scale = 2;
  EXPECT_EQ(c.run_on(tested()).message(), "bias_backward: beta_scale is 2, must be 0 to 1");
}

TEST(BiasBackwardOrder, IsRunsOfFourRowsInBlocksOfThirtyTwoFromTheGroupsFirstRow) {
  Batch batch({77, 130, 1, 64});
  for (const int64_t padding : {0, 3}) {
    const int64_t n = 600;
    Case c(batch, n, DType::kFP32, DType::kFP32, false, padding);
    ASSERT_TRUE(succeeds(c.run_on(tested(3))));
    for (int64_t g = 0; g < batch.num_groups(); ++g) {
      const int64_t first = batch.offsets()[static_cast<size_t>(g)];
      const int64_t end = batch.offsets()[static_cast<size_t>(g) + 1];
      for (int64_t j = 0; j < n; ++j) {
        float sum = 0;
        for (int64_t block = first; block < end; block += 32) {
          const int64_t block_end = std::min(block + 32, end);
          float partial = 0;
          for (int64_t first_of_run = block; first_of_run < block_end; first_of_run += 4) {
            float run = 0;
            for (int64_t i = first_of_run; i < std::min(first_of_run + 4, block_end); ++i) {
              run = std::fma(static_cast<float>(c.scale.get(0, i)),
                             static_cast<float>(c.grad_y.get(i, j)), run);
            }
            partial += run;
          }
          sum += partial;
        }
        ASSERT_EQ(c.grad_bias.get(g, j), sum) << "group " << g << " column " << j;
      }
    }
  }
}

// grad_scale of rows of one group.
void expect_documented_sums(Case& c) {
  for (int64_t i = 0; i < c.batch.rows(); ++i) {
    ASSERT_EQ(c.grad_scale.get(0, i), documented_dot(c.grad_y, i, c.bias, 0))
        << "n " << c.grad_y.view().columns() << " row " << i;
  }
}

TEST(BiasBackwardOrder, IsSixtyFourColumnsAtATimeInSixteenLanes) {
  const Batch batch({5});
  for (const int64_t n : {1, 15, 64, 100, 512, 1300, 2056}) {
    for (const int64_t padding : {0, 3}) {
      Case c(batch, n, DType::kFP32, DType::kFP32, false, padding);
      ASSERT_TRUE(succeeds(c.run_on(tested())));
      ASSERT_NO_FATAL_FAILURE(expect_documented_sums(c));
    }
  }
  for (const int64_t n : {64, 4104, 8200}) {
    Case c(batch, n, DType::kBF16, DType::kFP32, false, 0);
    ASSERT_TRUE(succeeds(c.run_on(tested())));
    ASSERT_NO_FATAL_FAILURE(expect_documented_sums(c));
  }
}

TEST(BiasBackwardOrder, GivesTheSameBitsOnAnyNumberOfThreadsAndWhenGathered) {
  const Batch batch({200, 0, 90, 300}, 10);
  Case c(batch, 300, DType::kBF16, DType::kFP32);
  ASSERT_TRUE(succeeds(c.run_on(cpu(1))));
  const TestTensor grad_bias = c.grad_bias, grad_scale = c.grad_scale;
  std::vector<int64_t> identity(static_cast<size_t>(batch.capacity()));
  std::iota(identity.begin(), identity.end(), 0);
  const TestTensor row_idx = index_tensor(DType::kInt64, identity);
  for (int threads = 2; threads <= 7; ++threads) {
    c.args.row_idx = threads % 2 == 0 ? TensorView() : row_idx.view();
    c.grad_bias.poison();
    c.grad_scale.poison();
    ASSERT_TRUE(succeeds(c.run_on(cpu(threads))));
    EXPECT_TRUE(same_bits(c.grad_bias, grad_bias));
    EXPECT_TRUE(same_bits(c.grad_scale, grad_scale));
  }
}

TEST(BiasBackwardParts, AreEachOptional) {
  const Batch batch({40, 0, 3}, 2);
  Case whole(batch, 50, DType::kFP16, DType::kFP16);
  whole.expect_right(tested());
  const TestTensor grad_bias = whole.grad_bias, grad_scale = whole.grad_scale;
  whole.grad_bias.poison();
  whole.grad_scale.poison();
  whole.args.bias = {};
  whole.args.grad_scale.rank = 0;  // absent, whatever its data is
  ASSERT_TRUE(succeeds(whole.run_on(tested())));
  EXPECT_TRUE(same_bits(whole.grad_bias, grad_bias));
  whole.args.grad_bias = whole.args.scale = {};
  whole.args.grad_scale = whole.grad_scale;
  whole.args.bias = whole.bias;
  size_t bytes = 1;  // the CPU adds a row's partial sums at once
  ASSERT_TRUE(succeeds(bias_backward_workspace(Context::create().value(), whole.args, &bytes)));
  EXPECT_EQ(bytes, 0U);
  ASSERT_TRUE(succeeds(whole.run_on(tested())));
  EXPECT_TRUE(same_bits(whole.grad_scale, grad_scale));
}

TEST(BiasBackwardParts, AbsentScaleIsOneAndAnUntouchedTailStays) {
  const Batch batch({66}, 4);
  Case c(batch, 40, DType::kBF16, DType::kFP32);
  c.scale.fill(1);
  ASSERT_TRUE(succeeds(c.run_on(tested())));
  const TestTensor grad_bias = c.grad_bias;
  c.grad_bias.poison();
  c.grad_scale.poison();
  c.args.scale = {};
  c.args.tail = MOIRE_TAIL_UNTOUCHED;
  ASSERT_TRUE(succeeds(c.run_on(tested())));
  EXPECT_TRUE(same_bits(c.grad_bias, grad_bias));
  EXPECT_TRUE(tail_is_untouched(c.grad_scale, batch.groups()));
}

TEST(BiasBackwardParts, NaNInOneGroupLeavesTheOthers) {
  const Batch batch({10, 80});
  Case c(batch, 24, DType::kBF16, DType::kFP32);
  c.expect_right(tested());
  const TestTensor clean = c.grad_bias;
  for (int64_t j = 0; j < 24; ++j) c.grad_y.set(12, j, std::numeric_limits<double>::quiet_NaN());
  c.grad_bias.poison();
  ASSERT_TRUE(succeeds(c.run_on(tested())));
  EXPECT_TRUE(same_bits(c.grad_bias, clean, 1));
  EXPECT_TRUE(std::isnan(c.grad_bias.get(1, 0)));
}

// The comparison notices sums over a neighbour's rows.
TEST(BiasBackwardParts, AStaleOffsetIsDetected) {
  Batch batch({31, 33});
  Case c(batch, 16, DType::kBF16, DType::kFP32);
  ASSERT_TRUE(succeeds(c.run_on(tested())));
  batch.offsets()[1] = 32;
  EXPECT_FALSE(matches(c.grad_bias, reference::bias_backward(c.args).grad_bias));
}

TEST(BiasBackwardErrors, NameWhatWasFoundAndNeeded) {
  const Batch batch({3, 2}, 1);
  Case c(batch, 8, DType::kBF16, DType::kFP32);
  const BiasBackwardArgs good = c.args;
  const auto expect = [&](Code code, const std::string& text) {
    EXPECT_TRUE(fails(bias_backward(cpu(), c.args), code, "bias_backward: " + text));
    c.args = good;
    EXPECT_TRUE(same_bits(c.grad_bias, TestTensor(DType::kFP32, {2, 8}, 2)));
    EXPECT_TRUE(same_bits(c.grad_scale, TestTensor(DType::kFP32, {6})));
  };
  expect(Code::kOutOfMemory, "the workspace has 0 bytes, needs 64");
  const TestTensor rows(DType::kBF16, {7, 8}), wide(DType::kFP32, {2, 9}), few(DType::kFP32, {5});
  c.args.grad_y = {};
  expect(Code::kInvalidArgument, "grad_y is absent, needs fp32, bf16 or fp16 of rank 2");
  c.args.grad_y = rows;
  expect(Code::kInvalidArgument, "grad_y is bf16 [7, 8] but groups.capacity is 6");
  c.args.grad_bias = wide;
  expect(Code::kInvalidArgument, "grad_bias is fp32 [2, 9], needs [G, n] = [2, 8]");
  c.args.bias = {};
  expect(Code::kInvalidArgument, "bias is absent, needs fp32, bf16 or fp16 [G, n] = [2, 8]");
  c.args.scale = few;
  expect(Code::kInvalidArgument, "scale is fp32 [5], needs [capacity] = [6]");
  c.args.grad_bias = c.args.grad_scale = {};
  expect(Code::kInvalidArgument, "there is nothing to do: grad_bias or grad_scale must be present");
  c.args.beta = 2;
  expect(Code::kInvalidArgument, "beta is 2, must be 0 to 1");
  c.args.tail = -1;
  expect(Code::kInvalidArgument, "tail is -1, must be 0 to 1");
  c.args.grad_scale = c.args.scale;
  expect(Code::kInvalidArgument, "grad_scale and scale overlap");
  const std::vector<uint8_t> betas = {1, 2};
  c.args.beta_per_group = betas.data();
  expect(Code::kInvalidArgument, "beta_per_group[1] is 2, must be 0 or 1");
  const TestTensor row_idx = index_tensor(DType::kInt32, {0, 1, 2, 6, 3, 99});
  c.args.row_idx = row_idx;
  expect(Code::kInvalidArgument, "row_idx[3] is 6, must be 0 to 5");
}

TEST(BiasBackwardExplain, CountsWhatIsAddedToAsRead) {
  const Batch batch({3, 2}, 1);
  Case c(batch, 8, DType::kBF16, DType::kFP32);
  c.args.beta_scale = 1;
  const Context explaining = cpu().explaining();
  ASSERT_TRUE(succeeds(run(explaining, c.args)));
  const Explanation steps = explaining.explanation();
  // grad_y, scale, bias, grad_scale; written: grad_bias and grad_scale.
  EXPECT_EQ(steps.at(0).bytes_read, 6 * 8 * 2 + 6 * 4 + 2 * 8 * 2 + 6 * 4);
  EXPECT_EQ(steps.at(0).bytes_written, 2 * 8 * 4 + 6 * 4);
}

}  // namespace
}  // namespace moire::test
