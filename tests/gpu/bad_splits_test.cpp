// Offsets that are wrong on the device: every op reports op, group and value, writes nothing
// outside of its buffers (StagedCall's guards), and the context works afterwards.
#include "tests/gpu/bad_splits.h"

#include <vector>

#include "tests/mlp/recipe_cases.h"
#include "tests/ops/quantize_support.h"
#include "tests/ops/routing_support.h"
#include "tests/support/mlp_problem.h"

namespace moire::test {
namespace {

TEST_F(BadSplits, OfGroupedGemmAreReported) {
  for_each_type([&](const GemmOptions& options) {
    Random random;
    for (const bool transpose_b : {false, true}) {
      GemmCase c(random, batch, 64, 128, transpose_b, options);
      expect_reported(batch, reporting("grouped_gemm", options), [&] { return c.run(alone()); });
    }
  });
}

TEST_F(BadSplits, OfGroupedGemmGluAreReported) {
  for_each_type([&](const GemmOptions& options) {
    Random random;
    GemmGluCase c(random, batch, 64, 128, options);
    expect_reported(batch, reporting("grouped_gemm_glu", options), [&] { return c.run(alone()); });
  });
}

TEST_F(BadSplits, OfGroupedGemmGluBackwardAreReported) {
  for_each_type([&](const GemmOptions& options) {
    Random random;
    GemmGluBackwardCase c(random, batch, 64, 128, options);
    expect_reported(batch, reporting("grouped_gemm_glu_backward", options),
                    [&] { return c.run(alone()); });
  });
}

TEST_F(BadSplits, OfGroupedGemmWgradAreReported) {
  for_each_type([&](const GemmOptions& options) {
    Random random;
    WgradCase c(random, batch, 64, 128, options);
    expect_reported(batch, reporting("grouped_gemm_wgrad", options),
                    [&] { return c.run(alone()); });
  });
}

TEST_F(BadSplits, OfGluAndItsGradientAreReported) {
  for (const int64_t width : {16, 4104}) {  // several rows of a block, and several parts of a row
    Random random;
    TestTensor z(DType::kBF16, {25, 2 * width}), grad_act(DType::kBF16, {25, width}),
        act(DType::kBF16, {25, width}), grad_z(DType::kBF16, {25, 2 * width}),
        probs(DType::kFP32, {25}), grad_probs(DType::kFP32, {25});
    z.randomize(random);
    grad_act.randomize(random);
    probs.randomize(random);
    GluArgs args;
    args.z = z;
    args.act = act;
    args.groups = batch.groups();
    expect_reported(batch, "glu", [&] { return glu(alone(), args); });
    GluBackwardArgs backward;
    backward.z = z;
    backward.grad_act = grad_act;
    backward.grad_z = grad_z;
    backward.groups = batch.groups();
    const auto call = [&] { return glu_backward(alone(), backward); };
    expect_reported(batch, "glu_backward", call);
    backward.probs = probs;
    backward.act = act;
    backward.grad_probs = grad_probs;
    expect_reported(batch, "glu_backward", call);
    EXPECT_TRUE(act.is_undamaged() && grad_z.is_undamaged() && grad_probs.is_undamaged());
  }
}

TEST_F(BadSplits, OfBiasBackwardAreReported) {
  for (const int64_t n : {32, 4104}) {
    Random random;
    TestTensor grad_y(DType::kBF16, {25, n}), bias(DType::kBF16, {3, n}), scale(DType::kFP32, {25}),
        grad_bias(DType::kFP32, {3, n}), grad_scale(DType::kFP32, {25});
    grad_y.randomize(random);
    bias.randomize(random);
    scale.randomize(random);
    std::vector<int64_t> backwards(25);
    for (size_t i = 0; i < backwards.size(); ++i) backwards[i] = 24 - static_cast<int64_t>(i);
    const TestTensor row_idx = index_tensor(DType::kInt32, backwards);
    BiasBackwardArgs args;
    args.grad_y = grad_y;
    args.grad_bias = grad_bias;
    args.groups = batch.groups();
    const auto call = [&] { return run(alone(), args); };
    expect_reported(batch, "bias_backward", call);
    args.row_idx = row_idx;
    args.scale = scale;
    args.bias = bias;
    args.grad_scale = grad_scale;
    expect_reported(batch, "bias_backward", call);
    args.grad_bias = {};
    args.scale = {};
    expect_reported(batch, "bias_backward", call);
    EXPECT_TRUE(grad_bias.is_undamaged() && grad_scale.is_undamaged());
  }
}

// Two blocks of rows that a thread walks down in one go then do not follow each other.
TEST_F(BadSplits, OfBiasBackwardMayLeaveBlocksApart) {
  Random random;
  for (const std::vector<int64_t>& wrong :
       std::vector<std::vector<int64_t>>{{64, 64, 96}, {0, 96, 32}, {0, 96, 64}, {32, 96, 96}}) {
    Batch wide({64, 32});
    TestTensor grad_y(DType::kBF16, {96, 64}), bias(DType::kBF16, {2, 64}),
        grad_bias(DType::kFP32, {2, 64}), grad_scale(DType::kFP32, {96});
    grad_y.randomize(random);
    bias.randomize(random);
    BiasBackwardArgs args;
    args.grad_y = grad_y;
    args.bias = bias;
    args.grad_bias = grad_bias;
    args.grad_scale = grad_scale;
    args.groups = wide.groups();
    ASSERT_TRUE(succeeds(run(alone(), args)));
    wide.offsets() = wrong;
    EXPECT_EQ(run(alone(), args).code(), Code::kInvalidArgument);
    EXPECT_TRUE(grad_bias.is_undamaged() && grad_scale.is_undamaged());
  }
}

// 23 of 30 choices, as a plan has them: choice 3 t + j lies in row 3 t + j, the last seven are
// dropped. The tail's rows name a token too: a wrong end may count them as rows in use, and then
// nothing but that end is to be found.
struct Routed {
  static constexpr int64_t kTokens = 10, kChoices = 3, kRouted = 23;

  Routed(int64_t capacity, DType index) : scatter_idx(index, {kTokens, kChoices}) {
    for (int64_t i = 0; i < kTokens * kChoices; ++i) {
      set_index(scatter_idx, i / kChoices, i % kChoices, i < kRouted ? i : -1);
    }
    std::vector<int64_t> tokens(static_cast<size_t>(capacity));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int64_t>(i) / kChoices;
    gather_idx = index_tensor(index, tokens);
  }

  TestTensor scatter_idx, gather_idx;
};

TEST_F(BadSplits, OfPermuteAreReported) {
  Random random;
  TestTensor x(DType::kBF16, {Routed::kTokens, 64}), rows(DType::kBF16, {batch.capacity(), 64}),
      weights(DType::kFP32, {Routed::kTokens, Routed::kChoices}),
      probs(DType::kFP32, {batch.capacity()});
  x.randomize(random);
  weights.randomize(random);
  for (const DType index : {DType::kInt32, DType::kInt64}) {
    const Routed routed(batch.capacity(), index);
    PermuteArgs args;
    args.x = x;
    args.gather_idx = routed.gather_idx;
    args.rows = rows;
    args.groups = batch.groups();
    const auto call = [&] { return permute(alone(), args); };
    expect_reported(batch, "permute", call);
    args.topk_weights = weights;
    args.scatter_idx = routed.scatter_idx;
    args.probs = probs;
    expect_reported(batch, "permute", call);
    EXPECT_TRUE(rows.is_undamaged() && probs.is_undamaged());
  }
}

TEST_F(BadSplits, OfUnpermuteBackwardAreReported) {
  for (const int64_t hidden : {64, 4104}) {
    for (const DType index : {DType::kInt32, DType::kInt64}) {
      Random random;
      const Routed routed(batch.capacity(), index);
      TestTensor grad_y(DType::kBF16, {Routed::kTokens, hidden}),
          rows(DType::kBF16, {batch.capacity(), hidden}),
          weights(DType::kFP32, {Routed::kTokens, Routed::kChoices}),
          grad_rows(DType::kBF16, {batch.capacity(), hidden}),
          grad_weights(DType::kFP32, {Routed::kTokens, Routed::kChoices});
      for (TestTensor* t : {&grad_y, &rows, &weights}) t->randomize(random);
      UnpermuteBackwardArgs args;
      args.grad_y = grad_y;
      args.scatter_idx = routed.scatter_idx;
      args.weights = weights;
      args.grad_rows = grad_rows;
      args.groups = batch.groups();
      const auto call = [&] { return unpermute_backward(alone(), args); };
      expect_reported(batch, "unpermute_backward", call);
      args.rows = rows;
      args.grad_weights = grad_weights;
      expect_reported(batch, "unpermute_backward", call);
      args.grad_rows = {};
      expect_reported(batch, "unpermute_backward", call);
      EXPECT_TRUE(grad_rows.is_undamaged() && grad_weights.is_undamaged());
    }
  }
}

TEST_F(BadSplits, OfTheWholeMlpAreReported) {
  Random random;
  MlpOptions options;
  options.ragged = {"Bad", kSplits, kTail};
  options.dtype = DType::kBF16;
  options.hidden = 128;
  options.width = 64;
  MlpProblem p(options, random);
  expect_reported(p.batch, "grouped_gemm_glu", [&] { return run(alone(), p.forward()); });
  expect_reported(p.batch, "grouped_gemm_glu_backward", [&] { return run(alone(), p.backward()); });
}

// The quantiser finds them, and the products after it read the same offsets.
TEST_F(BadSplits, OfTheWholeMlpIn8BitsAreReported) {
  for (const RecipeCase& c : recipes()) {
    SCOPED_TRACE(c);
    for (const char* implementation : {"", "portable"}) {
      Random random;
      MlpOptions options;
      options.ragged = {"Bad", kSplits, kTail};
      options.dtype = DType::kBF16;
      options.hidden = options.width = 128;
      options.in_8_bits = true;
      MlpProblem p(options, random);
      ContextOptions of_name = context().options();
      of_name.implementation = implementation;
      const Tested tested = Tested::alone(context().sharing(of_name).value());
      expect_reported(p.batch, "quantize", [&] { return run(tested, c.in(p.forward())); });
      expect_reported(p.batch, "quantize", [&] { return run(tested, c.in(p.backward())); });
    }
  }
}

TEST_F(BadSplits, NegativeOnesAndThosePastTheCapacityAreReported) {
  TestTensor splits(DType::kInt64, {4}), offsets(DType::kInt64, {5});
  const moire_offsets_output output{offsets, 1, 0};
  SplitsToOffsetsArgs args;
  args.splits = splits;
  args.capacity = 20;
  args.outputs = &output;
  args.num_outputs = 1;
  const auto call = [&](std::vector<int64_t> values) {
    std::copy(values.begin(), values.end(), splits.as<int64_t>());
    return run(alone(), args);
  };
  const std::string op = "splits_to_offsets: ";
  const Status right = call({1, 2, 3, 4});
  ASSERT_TRUE(succeeds(right));
  EXPECT_TRUE(fails(call({1, -2, 3, 4}), Code::kInvalidArgument,
                    op + "group 1 has -2 rows, must not be negative"));
  EXPECT_TRUE(fails(call({1, 2, 18, 4}), Code::kInvalidArgument, op + "group 2 ends at row 21"));
  EXPECT_TRUE(succeeds(call({1, 2, 3, 4})));
  EXPECT_EQ(offsets.as<int64_t>()[4], 10);
}

TEST_F(BadSplits, IndicesOutsideAreReported) {
  TestTensor topk(DType::kInt32, {6, 2}), offsets(DType::kInt64, {5}), gather(DType::kInt32, {12}),
      scatter(DType::kInt32, {6, 2});
  for (int64_t t = 0; t < 6; ++t) {
    for (int64_t j = 0; j < 2; ++j) set_index(topk, t, j, 0);
  }
  PermutePlanArgs args;
  args.topk_idx = topk;
  args.num_groups = 4;
  args.offsets = offsets;
  args.gather_idx = gather;
  args.scatter_idx = scatter;
  const auto call = [&] { return run(alone(), args); };
  const Status right = call();
  ASSERT_TRUE(succeeds(right));
  for (const int64_t wrong : {int64_t{5}, int64_t{-2}, int64_t{1} << 30}) {
    set_index(topk, 4, 1, wrong);
    EXPECT_TRUE(fails(call(), Code::kInvalidArgument, "permute_plan: topk_idx"));
    set_index(topk, 4, 1, 0);
    EXPECT_TRUE(succeeds(call()));
  }
}

// Runs `call` with each of a few wrong values of choice [4, 1], which is entry 13, then with the
// right one again. `limit` is what they have to be below.
void expect_choices_reported(TestTensor& scatter_idx, const std::string& op, int64_t limit,
                             const std::function<Status()>& call) {
  const Status right = call();
  ASSERT_TRUE(succeeds(right));
  for (const int64_t wrong : {limit, int64_t{-2}, int64_t{1} << 30}) {
    set_index(scatter_idx, 4, 1, wrong);
    EXPECT_TRUE(fails(call(), Code::kInvalidArgument,
                      op + ": scatter_idx[13] is " + std::to_string(wrong) + ", must be below " +
                          std::to_string(limit)));
    set_index(scatter_idx, 4, 1, 13);
    EXPECT_TRUE(succeeds(call())) << "after scatter_idx[13] was " << wrong;
  }
}

// unpermute has no groups: its rows are all that there are.
TEST_F(BadSplits, ChoicesOutsideAreReported) {
  Random random;
  Routed routed(batch.capacity(), DType::kInt32);
  TestTensor rows(DType::kBF16, {batch.capacity(), 64}), y(DType::kBF16, {Routed::kTokens, 64}),
      grad_rows(DType::kBF16, {batch.capacity(), 64}), probs(DType::kFP32, {batch.capacity()}),
      weights(DType::kFP32, {Routed::kTokens, Routed::kChoices}),
      out(DType::kFP32, {Routed::kTokens, Routed::kChoices});
  for (TestTensor* t : {&rows, &probs, &weights}) t->randomize(random);
  UnpermuteArgs back;
  back.rows = rows;
  back.scatter_idx = routed.scatter_idx;
  back.weights = weights;
  back.y = y;
  const auto unpermuted = [&] { return unpermute(alone(), back); };
  expect_choices_reported(routed.scatter_idx, "unpermute", batch.capacity(), unpermuted);
  back.probs = probs;
  back.topk_weights = out;
  expect_choices_reported(routed.scatter_idx, "unpermute", batch.capacity(), unpermuted);
  back.rows = back.weights = back.y = {};
  expect_choices_reported(routed.scatter_idx, "unpermute", batch.capacity(), unpermuted);
  PermuteArgs there;
  there.topk_weights = weights;
  there.scatter_idx = routed.scatter_idx;
  there.probs = probs;
  there.groups = batch.groups();
  expect_choices_reported(routed.scatter_idx, "permute", batch.rows(),
                          [&] { return permute(alone(), there); });
  y.randomize(random);
  UnpermuteBackwardArgs backward;
  backward.grad_y = y;
  backward.rows = rows;
  backward.scatter_idx = routed.scatter_idx;
  backward.grad_rows = grad_rows;
  backward.grad_weights = out;
  backward.groups = batch.groups();
  expect_choices_reported(routed.scatter_idx, "unpermute_backward", batch.rows(),
                          [&] { return unpermute_backward(alone(), backward); });
  for (const TestTensor* t : {&y, &out, &probs, &grad_rows}) EXPECT_TRUE(t->is_undamaged());
}

TEST_F(BadSplits, GatheredIndicesOutsideAreReported) {
  Random random;
  GemmOptions options;
  options.operands = options.output = DType::kBF16;
  options.row_idx = DType::kInt64;
  GemmCase c(random, batch, 64, 128, false, options);
  const Status right = c.run(alone());
  ASSERT_TRUE(succeeds(right));
  auto* const index = c.a.row_idx.as<int64_t>();
  const int64_t good = index[4];
  for (const int64_t wrong : {int64_t{-5}, int64_t{1} << 30, std::numeric_limits<int64_t>::max()}) {
    index[4] = wrong;
    EXPECT_TRUE(fails(c.run(alone()), Code::kInvalidArgument,
                      "grouped_gemm: row_idx[4] is " + std::to_string(wrong)));
    index[4] = good;
    EXPECT_TRUE(succeeds(c.run(alone())));
  }
}

// One call's finding is the next call's error, and is forgotten by that.
TEST_F(BadSplits, AreReportedOnceByTheNextCallOrByCheck) {
  Random random;
  GemmOptions options;
  options.operands = options.output = DType::kBF16;
  GemmCase c(random, batch, 64, 128, false, options);
  staging::StagedCall staged;
  batch.offsets()[3] = 40;
  staged.add(c.args());
  ASSERT_TRUE(succeeds(staged.upload()));
  size_t bytes = 0;
  ASSERT_TRUE(succeeds(grouped_gemm_workspace(context(), c.args(), &bytes)));
  if (bytes != 0) GTEST_SKIP() << "this implementation needs a workspace";
  const GroupedGemmArgs args = staged.on_device(c.args());
  const std::string sentence = "grouped_gemm: group 2 ends at row 40, past the capacity 25";
  ASSERT_TRUE(succeeds(moire::grouped_gemm(context(), args)));
  EXPECT_TRUE(fails(context().check(), Code::kInvalidArgument, sentence));
  EXPECT_TRUE(succeeds(context().check()));
  ASSERT_TRUE(succeeds(moire::grouped_gemm(context(), args)));
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  batch.offsets()[3] = batch.offsets()[2];
  ASSERT_TRUE(succeeds(staged.upload()));
  EXPECT_TRUE(fails(moire::grouped_gemm(context(), args), Code::kInvalidArgument, sentence));
  EXPECT_TRUE(succeeds(moire::grouped_gemm(context(), args)));
  EXPECT_TRUE(succeeds(context().check()));
}

}  // namespace
}  // namespace moire::test
