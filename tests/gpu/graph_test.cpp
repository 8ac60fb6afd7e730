// CUDA graphs: forward and backward of a grouped MLP captured once, replayed with other splits,
// as stored and in FP8.
#include <cuda_runtime.h>
#include <moire/explain.h>

#include <optional>
#include <ostream>
#include <vector>

#include "tests/gpu/gpu.h"
#include "tests/mlp/mlp_checks.h"
#include "tests/mlp/recipe_cases.h"

namespace moire::test {
namespace {

// Of 9000 rows. Every product has more tiles than a GPU has blocks, so blocks draw them.
const std::vector<std::vector<int64_t>> kSplits = {
    {529, 530, 528, 529, 531, 529, 530, 528, 529, 530, 529, 529, 530, 529, 530, 529, 531},
    {9000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {1, 127, 130, 31, 0, 0, 2000, 63, 64, 65, 1500, 191, 192, 193, 700, 0, 3000}};

// A whole MLP: its type, its recipe where that is an FP8 one, and whether its weights are lists.
struct Layer {
  DType dtype;
  RecipeCase recipe = {};
  bool listed = false;
};
std::vector<Layer> layers() {
  return {{DType::kBF16},
          {DType::kFP32},
          {DType::kBF16, {MOIRE_RECIPE_MXFP8}},
          {DType::kBF16, {MOIRE_RECIPE_FP8_BLOCK}},
          {DType::kBF16, {MOIRE_RECIPE_MXFP8_FAST}},
          {DType::kBF16, {}, true},
          {DType::kBF16, {MOIRE_RECIPE_MXFP8}, true}};
}
std::ostream& operator<<(std::ostream& out, const Layer& layer) {
  return out << dtype_name(layer.dtype) << ", " << layer.recipe << (layer.listed ? ", listed" : "");
}

MlpOptions options_of(const Layer& layer) {
  MlpOptions o;
  o.ragged = {"Graph", kSplits[0], 0};
  o.hidden = 768;
  o.width = 256;
  o.dtype = layer.dtype;
  o.in_8_bits = layer.recipe.recipe != 0;
  o.listed = layer.listed;
  return o;
}

// An MLP whose memory lies on the device, at addresses that stay.
class MlpOnDevice {
 public:
  MlpOnDevice(const Context& context, const Layer& layer)
      : context_(context), recipe_(layer.recipe), problem_(options_of(layer), random_) {}

  // Must be called once, first.
  Status stage() {
    GroupedMlpArgs forward = recipe_.in(problem_.forward());
    GroupedMlpBackwardArgs backward = recipe_.in(problem_.backward());
    size_t bytes[2];
    if (Status s = grouped_mlp_workspace(context_, forward, &bytes[0]); !s.ok()) return s;
    if (Status s = grouped_mlp_backward_workspace(context_, backward, &bytes[1]); !s.ok()) return s;
    workspaces_.emplace_back(bytes[0]);
    workspaces_.emplace_back(bytes[1]);
    forward.workspace = workspaces_[0].get();
    backward.workspace = workspaces_[1].get();
    staged_.add(forward);
    staged_.add(backward);
    if (Status s = staged_.upload(); !s.ok()) return s;
    forward_ = staged_.on_device(forward);
    backward_ = staged_.on_device(backward);
    return {};
  }

  Status run_forward() const { return moire::grouped_mlp(context_, forward_); }
  Status run_backward() const { return moire::grouped_mlp_backward(context_, backward_); }
  const GroupedMlpArgs& forward_args() const { return forward_; }
  const GroupedMlpBackwardArgs& backward_args() const { return backward_; }

  // Other splits of the same capacity, every output poisoned again.
  void change(const std::vector<int64_t>& splits) {
    int64_t at = 0;
    for (size_t g = 0; g < splits.size(); ++g) problem_.batch.offsets()[g + 1] = at += splits[g];
    const GroupedMlpArgs forward = problem_.forward();
    const GroupedMlpBackwardArgs backward = problem_.backward();
    Written outputs;
    visit_fields(forward, outputs);
    visit_fields(backward, outputs);
    poison(outputs);
    ASSERT_TRUE(succeeds(staged_.upload()));
  }

  // A copy with the bytes of every output, once the device is done.
  MlpProblem results() {
    EXPECT_TRUE(succeeds(context_.check()));
    EXPECT_TRUE(succeeds(staged_.download()));
    return problem_;
  }

 private:
  const Context& context_;
  RecipeCase recipe_;
  Random random_;
  MlpProblem problem_;
  staging::StagedCall staged_;
  std::vector<TestWorkspace> workspaces_;
  GroupedMlpArgs forward_;
  GroupedMlpBackwardArgs backward_;
};

using Graph = Captures;

TEST_F(Graph, CapturedOnceEqualsEagerForEverySplits) {
  for (const Layer& layer : layers()) {
    SCOPED_TRACE(testing::PrintToString(layer));
    MlpOnDevice mlp(on_stream(), layer);
    ASSERT_TRUE(succeeds(mlp.stage()));
    const auto both = [&] {
      const Status forward = mlp.run_forward();
      return forward.ok() ? mlp.run_backward() : forward;
    };
    ASSERT_TRUE(succeeds(both()));  // loads the kernels
    ASSERT_TRUE(succeeds(on_stream().check()));
    ASSERT_NO_FATAL_FAILURE(capture(both));
    for (const std::vector<int64_t>& splits : kSplits) {
      mlp.change(splits);
      ASSERT_TRUE(succeeds(both()));
      const MlpProblem eager = mlp.results();
      mlp.change(splits);
      replay();
      expect_same_results(mlp.results(), eager);
    }
  }
}

TEST_F(Graph, AHundredRunsGiveTheSameBits) {
  MlpOnDevice mlp(on_stream(), {DType::kBF16});
  ASSERT_TRUE(succeeds(mlp.stage()));
  std::optional<MlpProblem> first;
  for (int i = 0; i < 100; ++i) {
    mlp.change(kSplits[3]);
    ASSERT_TRUE(succeeds(mlp.run_forward()));
    ASSERT_TRUE(succeeds(mlp.run_backward()));
    const MlpProblem results = mlp.results();
    if (i == 0) first.emplace(results);
    expect_same_results(results, *first);
    if (HasFailure()) FAIL() << "in run " << i;
  }
}

// The nodes of the captured call are kernels, as many as explain says: no casts, scans or copies
// around the products.
template <class Args>
void expect_launches(const Context& context, Status (*op)(const Context&, const Args&),
                     const Args& args, std::pair<size_t, size_t> nodes, size_t expected) {
  const Context explaining = context.explaining();
  ASSERT_TRUE(succeeds(op(explaining, args)));
  int64_t launches = 0;
  for (const Step& step : explaining.explanation()) {
    launches += step.launches;
    EXPECT_TRUE(!step.op.starts_with("grouped_gemm") || step.implementation == "sm90");
  }
  EXPECT_EQ(launches, static_cast<int64_t>(expected));
  EXPECT_EQ(nodes.first, expected);
  EXPECT_EQ(nodes.second, expected);
}

TEST_F(Graph, LaunchesOnlyWhatTheMathematicsNeeds) {
  if (!has_sm90()) GTEST_SKIP() << "elsewhere products are several launches";
  struct Case {
    Layer layer;
    size_t forward, backward;
  };
  // Four products; the sums of grad_probs, grad_b1 and grad_b2 have a fixed order, so they are
  // partial sums and their sum: one more launch for grad_probs, one for grad_b1, three for grad_b2
  // with its share of grad_probs. In FP8 x, grad_y and the weights are quantised, and x once more
  // for the backward; the activation is a launch of its own, with act's values in it, and backward
  // those of grad_z and the partial sums of grad_probs and grad_b1.
  std::vector<Case> cases{{{DType::kBF16}, 2, 4 + 1 + 1 + 3}};
  for (const int32_t fp8 : {MOIRE_RECIPE_MXFP8, MOIRE_RECIPE_MXFP8_FAST, MOIRE_RECIPE_FP8_BLOCK}) {
    cases.push_back({{DType::kBF16, {fp8}}, 2 + 3 + 1, 4 + 1 + 2 + 3 + 4});
  }
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::PrintToString(c.layer));
    MlpOnDevice mlp(on_stream(), c.layer);
    ASSERT_TRUE(succeeds(mlp.stage()));
    ASSERT_TRUE(succeeds(mlp.run_forward()));
    ASSERT_TRUE(succeeds(mlp.run_backward()));
    ASSERT_TRUE(succeeds(on_stream().check()));
    ASSERT_NO_FATAL_FAILURE(capture([&] { return mlp.run_forward(); }));
    expect_launches(on_stream(), moire::grouped_mlp, mlp.forward_args(), count_nodes(), c.forward);
    ASSERT_NO_FATAL_FAILURE(capture([&] { return mlp.run_backward(); }));
    expect_launches(on_stream(), moire::grouped_mlp_backward, mlp.backward_args(), count_nodes(),
                    c.backward);
  }
}

}  // namespace
}  // namespace moire::test
