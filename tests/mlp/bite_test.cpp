// Tests of the tests: mistakes that train garbage silently must fail the comparison with the
// reference. Each test makes one mistake in what the op is given and none in what the reference is
// given.
#include "tests/mlp/mlp_checks.h"

namespace moire::test {
namespace {

class Bite : public testing::TestWithParam<DType> {
 protected:
  Bite() {
    options.dtype = GetParam();
    options.ragged = {"Two", {6, 4}};
    options.hidden = 16;
    options.width = 8;
  }
  // Whether the forward of `given` passes for that of `meant`.
  testing::AssertionResult passes_for(const GroupedMlpArgs& given, const GroupedMlpArgs& meant) {
    const reference::MlpResults want = reference::grouped_mlp(meant);
    const Status status = run(cpu(), given);
    if (!status.ok()) return succeeds(status);
    return matches(given.y, want.y, meant.groups);
  }
  Random random;
  MlpOptions options;
};

TEST_P(Bite, TheRightCallPasses) {
  const MlpProblem p(options, random);
  EXPECT_TRUE(passes_for(p.forward(), p.forward()));
}

TEST_P(Bite, ASwappedGateAndUpHalfFails) {
  const MlpProblem p(options, random);
  GroupedMlpArgs given = p.forward();
  given.layout.order = MOIRE_UP_FIRST;
  EXPECT_FALSE(passes_for(given, p.forward()));
}

TEST_P(Bite, AnUninterleavedWeightFails) {
  options.layout = GluLayout::interleaved(1);
  const MlpProblem p(options, random);
  GroupedMlpArgs given = p.forward();
  given.layout = GluLayout::halves();
  EXPECT_FALSE(passes_for(given, p.forward()));
}

TEST_P(Bite, AWrongBlockFails) {
  options.layout = GluLayout::interleaved(4);
  const MlpProblem p(options, random);
  GroupedMlpArgs given = p.forward();
  given.layout = GluLayout::interleaved(2);
  EXPECT_FALSE(passes_for(given, p.forward()));
}

TEST_P(Bite, AStaleOffsetFails) {
  const MlpProblem p(options, random);
  const int64_t stale[] = {0, 5, 10};  // one row went to the other expert
  GroupedMlpArgs given = p.forward();
  given.groups.offsets = stale;
  EXPECT_FALSE(passes_for(given, p.forward()));
}

TEST_P(Bite, ATransposedSquareWeightFails) {
  options.hidden = options.width = 8;
  const MlpProblem p(options, random);
  GroupedMlpArgs given = p.forward();
  given.w2.layout = MOIRE_IN_OUT;
  EXPECT_FALSE(passes_for(given, p.forward()));
}

TEST_P(Bite, AForgottenBiasOrProbFails) {
  const MlpProblem p(options, random);
  GroupedMlpArgs given = p.forward();
  given.b1 = {};
  EXPECT_FALSE(passes_for(given, p.forward()));
  given = p.forward();
  given.b2 = {};
  EXPECT_FALSE(passes_for(given, p.forward()));
  given = p.forward();
  given.probs = {};
  EXPECT_FALSE(passes_for(given, p.forward()));
}

TEST_P(Bite, AnotherActivationFails) {
  const MlpProblem p(options, random);
  GroupedMlpArgs given = p.forward();
  given.activation = Activation::geglu_tanh();
  EXPECT_FALSE(passes_for(given, p.forward()));
}

// A single wrong product of the last group, in the last element of its sum.
TEST_P(Bite, OneWrongWeightFails) {
  const MlpProblem p(options, random);
  MlpProblem given = p;
  given.w2.set(1, 3, options.width - 1, p.w2.get(1, 3, options.width - 1) + 0.25);
  EXPECT_FALSE(passes_for(given.forward(), p.forward()));
}

// The same for gradients: each mistake shows in some gradient.
TEST_P(Bite, MistakesOfTheBackwardFail) {
  const MlpProblem p(options, random);
  ASSERT_TRUE(succeeds(run(cpu(), p.forward())));
  const reference::MlpGradients want = reference::grouped_mlp_backward(p.backward());
  const int64_t stale[] = {0, 5, 10};
  GroupedMlpBackwardArgs swapped = p.backward(), moved = p.backward(), doubled = p.backward();
  swapped.layout.order = MOIRE_UP_FIRST;
  moved.groups.offsets = stale;
  ASSERT_TRUE(succeeds(run(cpu(), swapped)));
  EXPECT_FALSE(matches(p.grad_x, want.grad_x));
  EXPECT_FALSE(matches(p.grad_w1, want.grad_w1));
  EXPECT_FALSE(matches(p.grad_w2, want.grad_w2));  // act, made again from a swapped z
  ASSERT_TRUE(succeeds(run(cpu(), moved)));
  EXPECT_FALSE(matches(p.grad_w1, want.grad_w1));
  EXPECT_FALSE(matches(p.grad_w2, want.grad_w2));
  EXPECT_FALSE(matches(p.grad_b2, want.grad_b2));
  ASSERT_TRUE(succeeds(run(cpu(), p.backward())));
  doubled.beta_w1 = doubled.beta_w2 = doubled.beta_bias = 1;  // onto the right gradients
  ASSERT_TRUE(succeeds(run(cpu(), doubled)));
  EXPECT_FALSE(matches(p.grad_w1, want.grad_w1));
  EXPECT_FALSE(matches(p.grad_b1, want.grad_b1));
  EXPECT_TRUE(matches(p.grad_x, want.grad_x));
}

INSTANTIATE_TEST_SUITE_P(StorageTypes, Bite,
                         testing::Values(DType::kFP32, DType::kBF16, DType::kFP16),
                         dtype_case_name);

}  // namespace
}  // namespace moire::test
