// What the tests of wrong arguments of the grouped GEMMs share.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/grouped_gemm_cases.h"

namespace moire::test {

// A sound call of each op, to be spoilt in one place; outputs stay as they were.
class GroupedGemmRejects : public testing::Test {
 protected:
  // Rows of each group, columns of grouped_gemm's output.
  GroupedGemmRejects(const std::vector<int64_t>& splits, int64_t n, const GemmOptions& options)
      : batch(splits),
        gemm(random, batch, n, 64, false, options),
        glu(random, batch, 6, 64, options),
        glu_backward(random, batch, 6, 64, options),
        wgrad(random, batch, 6, 8, options) {}

  void rejects(const GroupedGemmArgs& args, const std::string& text,
               Code code = Code::kInvalidArgument) {
    EXPECT_TRUE(fails(run(context, args), code, text));
    TestTensor poisoned = gemm.d;
    poisoned.poison();
    EXPECT_TRUE(same_bits(gemm.d, poisoned));
  }
  void rejects(const GroupedGemmGluArgs& args, const std::string& text) {
    EXPECT_TRUE(fails(run(context, args), Code::kInvalidArgument, text));
  }
  void rejects(const GroupedGemmGluBackwardArgs& args, const std::string& text) {
    EXPECT_TRUE(fails(run(context, args), Code::kInvalidArgument, text));
  }
  void rejects(const GroupedGemmWgradArgs& args, const std::string& text) {
    EXPECT_TRUE(fails(run(context, args), Code::kInvalidArgument, text));
  }

  Random random;
  Context context = cpu(1);
  Batch batch;
  GemmCase gemm;
  GemmGluCase glu;
  GemmGluBackwardCase glu_backward;
  WgradCase wgrad;
};

}  // namespace moire::test
