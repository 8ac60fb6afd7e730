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
    EXPECT_TRUE(fails(run(context, args, grouped_gemm, grouped_gemm_workspace), code, text));
    TestTensor poisoned = gemm.d;
    poisoned.poison();
    EXPECT_TRUE(same_bits(gemm.d, poisoned));
  }
  void rejects(const GroupedGemmGluArgs& args, const std::string& text) {
    EXPECT_TRUE(fails(run(context, args, grouped_gemm_glu, grouped_gemm_glu_workspace),
                      Code::kInvalidArgument, text));
  }
  void rejects(const GroupedGemmGluBackwardArgs& args, const std::string& text) {
    EXPECT_TRUE(
        fails(run(context, args, grouped_gemm_glu_backward, grouped_gemm_glu_backward_workspace),
              Code::kInvalidArgument, text));
  }
  void rejects(const GroupedGemmWgradArgs& args, const std::string& text) {
    EXPECT_TRUE(fails(run(context, args, grouped_gemm_wgrad, grouped_gemm_wgrad_workspace),
                      Code::kInvalidArgument, text));
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
