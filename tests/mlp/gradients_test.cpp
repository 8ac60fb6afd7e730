// The MLP's FP32 gradients against central differences of the reference in double: no backward
// formula, ours or the reference's, is on both sides.
#include <cmath>
#include <memory>

#include "tests/mlp/mlp_checks.h"
#include "tests/support/differences.h"

namespace moire::test {
namespace {

// FP32 rounding through two layers, relative to the size of the loss; the differences themselves
// are good to kDifferenceError.
constexpr double kAllowed = 64 * 0x1p-24 + kDifferenceError;

// The FP32 problem with FP64 storage, for differences.
TestTensor widened(const TestTensor& t) {
  const TensorView v = t;
  if (!v.is_present()) return {};
  TestTensor wide = v.rank == 1 ? TestTensor(DType::kFP64, {v.shape[0]})
                                : TestTensor(DType::kFP64, {v.shape[0], v.shape[1]});
  for (int64_t i = 0; i < v.num_rows(); ++i) {
    for (int64_t j = 0; j < v.columns(); ++j) wide.set(i, j, t.get(i, j));
  }
  return wide;
}

TestWeight widened(const TestWeight& w, int64_t out, int64_t in) {
  const moire_weight v = w;
  TestWeight wide(DType::kFP64, v.tensor.shape[0], out, in, v.layout);
  for (int64_t g = 0; g < v.tensor.shape[0]; ++g) {
    for (int64_t i = 0; i < out; ++i) {
      for (int64_t j = 0; j < in; ++j) wide.set(g, i, j, w.get(g, i, j));
    }
  }
  return wide;
}

// The loss sum(y * grad_y) in double, and the absolute values of its terms.
struct Loss {
  explicit Loss(const MlpProblem& p) : problem(p) {
    const int64_t hidden = p.options.hidden, width = p.options.width;
    problem.b2_scale = widened(p.b2_scale);
    problem.options.dtype = DType::kFP64;
    problem.x = widened(p.x);
    problem.b1 = widened(p.b1);
    problem.b2 = widened(p.b2);
    problem.probs = widened(p.probs);
    problem.grad_y = widened(p.grad_y);
    problem.w1 = widened(p.w1, p.options.fc1_width(), hidden);
    problem.w2 = widened(p.w2, p.options.out_features(), width);
  }
  double operator()() const { return sum(false); }
  double sum(bool absolute) const {
    const reference::Matrix y =
        reference::grouped_mlp(problem.forward(), reference::Rounding::kNone).y;
    double loss = 0;
    for (int64_t i = 0; i < y.rows; ++i) {
      for (int64_t j = 0; j < y.columns; ++j) {
        const double term = y.at(i, j).value * problem.grad_y.get(i, j);
        loss += absolute ? std::abs(term) : term;
      }
    }
    return loss;
  }
  MlpProblem problem;
};

// z away from the kinks of the clamp, or of a ReLU at 0, so that a small step crosses none.
bool is_smooth(const MlpProblem& p) {
  const auto limit = static_cast<double>(p.options.activation.limit);
  for (int64_t i = 0; i < p.batch.rows(); ++i) {
    for (int64_t j = 0; j < p.options.fc1_width(); ++j) {
      if (std::abs(std::abs(p.z.get(i, j)) - limit) < 1e-3) return false;
    }
  }
  return true;
}

class MlpGradients : public testing::TestWithParam<MlpOptions> {};

TEST_P(MlpGradients, AreTheDerivativesOfTheForward) {
  Random random;
  MlpOptions options = GetParam();
  options.hidden = 6;
  options.width = 4;
  std::unique_ptr<MlpProblem> problem;
  do {
    problem = std::make_unique<MlpProblem>(options, random);
    ASSERT_TRUE(succeeds(run(cpu(), problem->forward())));
  } while (!is_smooth(*problem));
  const MlpProblem& p = *problem;
  ASSERT_TRUE(succeeds(run(cpu(), p.backward())));
  Loss loss(p);
  MlpProblem& d = loss.problem;
  const double allowed = kAllowed * (1 + loss.sum(true));

  for (int64_t g = 0; g < p.batch.num_groups(); ++g) {
    for (int64_t out = 0; out < options.fc1_width(); ++out) {
      ASSERT_NEAR(p.grad_b1.get(g, out), central_difference(d.b1, g, out, loss), allowed);
      for (int64_t in = 0; in < options.hidden; ++in) {
        ASSERT_NEAR(p.grad_w1.get(g, out, in), central_difference(d.w1, g, out, in, loss), allowed)
            << "grad_w1 of group " << g << " [" << out << ", " << in << "]";
      }
    }
    for (int64_t out = 0; out < options.out_features(); ++out) {
      ASSERT_NEAR(p.grad_b2.get(g, out), central_difference(d.b2, g, out, loss), allowed);
      for (int64_t in = 0; in < options.width; ++in) {
        ASSERT_NEAR(p.grad_w2.get(g, out, in), central_difference(d.w2, g, out, in, loss), allowed)
            << "grad_w2 of group " << g << " [" << out << ", " << in << "]";
      }
    }
  }
  for (int64_t i = 0; i < p.batch.rows(); ++i) {
    ASSERT_NEAR(p.grad_probs.get(0, i), central_difference(d.probs, 0, i, loss), allowed);
    if (p.with_own_b2_scale()) {
      ASSERT_NEAR(p.grad_b2_scale.get(0, i), central_difference(d.b2_scale, 0, i, loss), allowed);
    }
    for (int64_t j = 0; j < options.hidden; ++j) {
      ASSERT_NEAR(p.grad_x.get(i, j), central_difference(d.x, i, j, loss), allowed)
          << "grad_x [" << i << ", " << j << "]";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, MlpGradients,
    testing::Values(MlpOptions{}, MlpOptions{.layout = GluLayout::interleaved(1)},
                    MlpOptions{.layout = GluLayout::interleaved(2, MOIRE_UP_FIRST)},
                    MlpOptions{.activation = Activation::clamped_swiglu()},
                    MlpOptions{.activation = Activation::clamped_swiglu(0.6F, 1.702F, 1)},
                    MlpOptions{.activation = Activation::geglu_tanh()},
                    MlpOptions{.out = 5, .b2_scale = B2Scale::kOwn},
                    MlpOptions{.out = 9, .b2_scale = B2Scale::kNothing},
                    MlpOptions{.activation = Activation::reglu()},
                    MlpOptions{.activation = Activation::reglu2(), .layout = GluLayout::ungated()},
                    MlpOptions{.layout = GluLayout::ungated()},
                    MlpOptions{.w1_layout = MOIRE_IN_OUT, .w2_layout = MOIRE_IN_OUT}));

}  // namespace
}  // namespace moire::test
