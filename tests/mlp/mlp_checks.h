// Runs a grouped MLP problem and holds every output to the reference.
#pragma once

#include <gtest/gtest.h>

#include "tests/support/mlp_problem.h"
#include "tests/support/outputs.h"

namespace moire::test {

inline void expect_mlp_is_right(const Tested& context, const MlpOptions& options, Random& random) {
  SCOPED_TRACE(testing::PrintToString(options));
  const MlpProblem p(options, random);
  ASSERT_NO_FATAL_FAILURE(expect_right(context, p.forward()));
  expect_right(context, p.backward());  // which reads z (and act) as the forward left them
  EXPECT_TRUE(p.is_undamaged());
}

inline void expect_same_results(const MlpProblem& got, const MlpProblem& want) {
  EXPECT_TRUE(same_outputs(got.forward(), want.forward()));
  EXPECT_TRUE(same_outputs(got.backward(), want.backward()));
  EXPECT_TRUE(got.is_undamaged());
}

inline constexpr B2Scale kB2Scales[] = {B2Scale::kProbs, B2Scale::kNothing, B2Scale::kOwn};

// Where gate and up, block by block, may lie for F = 8 and multiples of it; and no up at all.
inline std::vector<GluLayout> glu_layouts() {
  return {GluLayout::halves(),
          moire_glu_layout{0, MOIRE_UP_FIRST},
          GluLayout::interleaved(1),
          GluLayout::interleaved(8),
          GluLayout::interleaved(2, MOIRE_UP_FIRST),
          GluLayout::ungated()};
}

inline std::vector<Activation> activations() {
  return {Activation::swiglu(), Activation::clamped_swiglu(), Activation::geglu_tanh(),
          Activation::reglu(), Activation::reglu2()};
}

}  // namespace moire::test
