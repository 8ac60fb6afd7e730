// More tiles than the GPU has blocks, so that each block works on several, one behind the other.
#include <vector>

#include "tests/gpu/gpu.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"
#include "tests/support/tested.h"

namespace moire::test {
namespace {

class ManyTiles : public Gpu {};

// Gradients of 256 rows: a tile of 192 is followed by one of 64, in which some warpgroups have
// nothing to multiply. Those keep the pace of the others while warps of theirs may still be adding
// up the tile before.
TEST_F(ManyTiles, OfWeightGradientsWhoseHeightLeavesWarpgroupsIdle) {
  constexpr int64_t kGroups = 96, kRows = 448, kM = 256, kN = 512, kBefore = 2;
  TestTensor a(DType::kBF16, {kGroups * kRows, kM}), b(DType::kBF16, {kGroups * kRows, kN});
  a.fill(1), b.fill(1);
  std::vector<int64_t> offsets;
  for (int64_t g = 0; g <= kGroups; ++g) offsets.push_back(g * kRows);
  for (const DType dtype : {DType::kBF16, DType::kFP32}) {
    TestTensor d(dtype, {kGroups, kM, kN});
    d.fill(kBefore);
    GroupedGemmWgradArgs args;
    args.a = a, args.b = b, args.d = Weight(d);
    args.groups = Groups(offsets.data(), kGroups, kGroups * kRows);
    args.beta = 1;
    ASSERT_TRUE(succeeds(grouped_gemm_wgrad(Tested::alone(context()), args)));
    int64_t wrong = 0;
    for (int64_t row = 0; row < kGroups * kM; ++row) {
      for (int64_t n = 0; n < kN; ++n) wrong += d.get(row, n) != kBefore + kRows;
    }
    EXPECT_EQ(wrong, 0) << dtype_name(dtype);
  }
}

}  // namespace
}  // namespace moire::test
