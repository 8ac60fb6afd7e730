// What results must not depend on: the run, the number of threads, the order of the groups, other
// groups' data, the contents of the workspace, the splits (for its size).
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/mlp/mlp_checks.h"

namespace moire::test {
namespace {

void run_both(const Tested& context, const MlpProblem& p) {
  ASSERT_TRUE(succeeds(run(context, p.forward())));
  ASSERT_TRUE(succeeds(run(context, p.backward())));
}

MlpOptions uneven(DType dtype) {
  MlpOptions options;
  options.dtype = dtype;
  options.ragged = {"Uneven", {65, 0, 1, 130, 17}, 1};
  options.hidden = 72;
  options.width = 40;
  return options;
}

class Invariance : public testing::TestWithParam<DType> {};

TEST_P(Invariance, SameBitsOnEveryRunAndNumberOfThreads) {
  Random random;
  const MlpProblem once(uneven(GetParam()), random);
  const MlpProblem untouched = once;
  run_both(cpu(1), once);
  for (const int num_threads : {1, 2, 3, 5}) {
    SCOPED_TRACE(num_threads);
    const MlpProblem again = untouched;
    run_both(cpu(num_threads), again);
    expect_same_results(again, once);
  }
}

// Group g of `p` becomes group order[g].
MlpProblem reordered(const MlpProblem& p, const std::vector<int64_t>& order, Random& random) {
  MlpOptions options = p.options;
  for (size_t g = 0; g < order.size(); ++g) {
    options.ragged.splits[static_cast<size_t>(order[g])] = p.options.ragged.splits[g];
  }
  MlpProblem out(options, random);
  const int64_t hidden = options.hidden, width = options.width;
  for (int64_t g = 0; g < p.batch.num_groups(); ++g) {
    const int64_t to = order[static_cast<size_t>(g)];
    for (int64_t i = 0; i < hidden; ++i) {
      out.b2.set(to, i, p.b2.get(g, i));
      for (int64_t j = 0; j < width; ++j) out.w2.set(to, i, j, p.w2.get(g, i, j));
      for (int64_t j = 0; j < 2 * width; ++j) out.w1.set(to, j, i, p.w1.get(g, j, i));
    }
    for (int64_t j = 0; j < 2 * width; ++j) out.b1.set(to, j, p.b1.get(g, j));
    const int64_t rows = p.options.ragged.splits[static_cast<size_t>(g)];
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t from_row = p.batch.groups().offsets[g] + i;
      const int64_t to_row = out.batch.groups().offsets[to] + i;
      out.probs.set(0, to_row, p.probs.get(0, from_row));
      for (int64_t j = 0; j < hidden; ++j) {
        out.x.set(to_row, j, p.x.get(from_row, j));
        out.grad_y.set(to_row, j, p.grad_y.get(from_row, j));
      }
    }
  }
  return out;
}

TEST_P(Invariance, SameBitsInEveryOrderOfTheGroups) {
  Random random;
  const MlpProblem p(uneven(GetParam()), random);
  const std::vector<int64_t> order{3, 4, 0, 2, 1};
  const MlpProblem q = reordered(p, order, random);
  run_both(tested(), p);
  run_both(tested(), q);
  for (int64_t g = 0; g < p.batch.num_groups(); ++g) {
    SCOPED_TRACE(testing::Message() << "group " << g);
    const int64_t to = order[static_cast<size_t>(g)];
    const auto rows_of = [](const TestTensor& t, const MlpProblem& owner, int64_t group) {
      TensorView view = t;
      const int64_t begin = owner.batch.groups().offsets[group];
      const int64_t row_elements = view.rank == 1 ? 1 : view.stride();
      view.data = static_cast<char*>(view.data) + begin * row_elements * dtype_size(view.type());
      view.shape[0] = owner.batch.groups().offsets[group + 1] - begin;
      return view;
    };
    EXPECT_TRUE(same_bits(rows_of(q.y, q, to), rows_of(p.y, p, g))) << "y";
    EXPECT_TRUE(same_bits(rows_of(q.grad_x, q, to), rows_of(p.grad_x, p, g))) << "grad_x";
    EXPECT_TRUE(same_bits(rows_of(q.grad_probs, q, to), rows_of(p.grad_probs, p, g)));
    const auto matrix = [](const TestWeight& w, int64_t group) {
      return Weight(w.view()).matrix(group);
    };
    EXPECT_TRUE(same_bits(matrix(q.grad_w1, to), matrix(p.grad_w1, g))) << "grad_w1";
    EXPECT_TRUE(same_bits(matrix(q.grad_w2, to), matrix(p.grad_w2, g))) << "grad_w2";
  }
}

// NaN and infinity in everything that group 3 owns.
TEST_P(Invariance, BadNumbersStayInTheirGroup) {
  Random random;
  const MlpProblem clean(uneven(GetParam()), random);
  MlpProblem dirty = clean;
  const int64_t begin = dirty.batch.groups().offsets[3], end = dirty.batch.groups().offsets[4];
  for (int64_t i = begin; i < end; ++i) {
    const double bad = i % 2 == 0 ? std::numeric_limits<double>::quiet_NaN()
                                  : std::numeric_limits<double>::infinity();
    dirty.x.set(i, i % dirty.options.hidden, bad);
    dirty.grad_y.set(i, (i + 1) % dirty.options.hidden, bad);
    dirty.probs.set(0, i, bad);
  }
  dirty.w1.set(3, 0, 0, std::numeric_limits<double>::quiet_NaN());
  dirty.b2.set(3, 0, std::numeric_limits<double>::infinity());
  run_both(tested(), clean);
  run_both(tested(), dirty);
  for (int64_t g = 0; g < clean.batch.num_groups(); ++g) {
    if (g == 3) continue;
    SCOPED_TRACE(testing::Message() << "group " << g);
    for (int64_t i = clean.batch.groups().offsets[g]; i < clean.batch.groups().offsets[g + 1];
         ++i) {
      EXPECT_EQ(dirty.grad_probs.get(0, i), clean.grad_probs.get(0, i));
      for (int64_t j = 0; j < clean.options.hidden; ++j) {
        ASSERT_EQ(dirty.y.get(i, j), clean.y.get(i, j));
        ASSERT_EQ(dirty.grad_x.get(i, j), clean.grad_x.get(i, j));
      }
    }
    EXPECT_TRUE(same_bits(Weight(dirty.grad_w1).matrix(g), Weight(clean.grad_w1).matrix(g)));
    EXPECT_TRUE(same_bits(Weight(dirty.grad_w2).matrix(g), Weight(clean.grad_w2).matrix(g)));
    for (int64_t j = 0; j < clean.options.hidden; ++j) {
      EXPECT_EQ(dirty.grad_b2.get(g, j), clean.grad_b2.get(g, j));
    }
  }
  EXPECT_TRUE(std::isnan(dirty.y.get(begin + begin % 2, 0)));  // and the check would see it
}

INSTANTIATE_TEST_SUITE_P(StorageTypes, Invariance,
                         testing::Values(DType::kFP32, DType::kBF16, DType::kFP16),
                         dtype_case_name);

TEST(Workspace, SizeDependsOnTheCapacityAndNotOnTheSplits) {
  Random random;
  std::vector<size_t> forward, backward;
  for (const std::vector<int64_t>& splits :
       {std::vector<int64_t>{40, 0, 0, 0}, {10, 10, 10, 10}, {0, 0, 0, 0}, {1, 2, 0, 37}}) {
    MlpOptions options;
    options.ragged = {"Splits", splits};
    options.ragged.tail = 40 - options.ragged.rows();
    const MlpProblem p(options, random);
    size_t bytes = 0;
    ASSERT_TRUE(succeeds(grouped_mlp_workspace(tested(), p.forward(), &bytes)));
    forward.push_back(bytes);
    ASSERT_TRUE(succeeds(grouped_mlp_backward_workspace(tested(), p.backward(), &bytes)));
    backward.push_back(bytes);
  }
  EXPECT_EQ(std::count(forward.begin(), forward.end(), forward[0]), 4);
  EXPECT_EQ(std::count(backward.begin(), backward.end(), backward[0]), 4);
}

// One byte too few: refused before anything is written.
TEST(Workspace, TooSmallIsRefusedAndLeavesOutputsUntouched) {
  Random random;
  const MlpProblem p({}, random);
  const MlpProblem before = p;
  size_t bytes = 0;
  ASSERT_TRUE(succeeds(grouped_mlp_workspace(cpu(), p.forward(), &bytes)));
  ASSERT_GT(bytes, 0U);
  const TestWorkspace short_forward(bytes - 1);
  GroupedMlpArgs forward = p.forward();
  forward.workspace = short_forward.get();
  EXPECT_TRUE(fails(grouped_mlp(cpu(), forward), Code::kOutOfMemory,
                    "grouped_mlp: the workspace has " + std::to_string(bytes - 1) +
                        " bytes, needs " + std::to_string(bytes)));
  EXPECT_TRUE(same_outputs(p.forward(), before.forward()));

  ASSERT_TRUE(succeeds(run(cpu(), p.forward())));
  ASSERT_TRUE(succeeds(grouped_mlp_backward_workspace(cpu(), p.backward(), &bytes)));
  const TestWorkspace short_backward(bytes - 1);
  GroupedMlpBackwardArgs backward = p.backward();
  backward.workspace = short_backward.get();
  EXPECT_TRUE(fails(grouped_mlp_backward(cpu(), backward), Code::kOutOfMemory,
                    "grouped_mlp_backward: the workspace has " + std::to_string(bytes - 1) +
                        " bytes, needs " + std::to_string(bytes)));
  EXPECT_TRUE(same_outputs(p.backward(), before.backward()));
}

}  // namespace
}  // namespace moire::test
