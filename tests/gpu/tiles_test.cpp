// Every tile that the cost model may choose for Hopper's kernels, asked for by name: the same bits
// whichever it is.
#include <cstdlib>
#include <string>
#include <vector>

#include "backend/cuda/sm90/grouped_gemm_heuristics.h"
#include "tests/gpu/gpu.h"
#include "tests/support/grouped_gemm_cases.h"

namespace moire::test {
namespace {

template <class... P>
std::vector<std::string> texts_of(cuda::sm90::Candidates<P...>) {
  return {P::text()...};
}

class Tiles : public Hopper {
 protected:
  void TearDown() override { unsetenv("MOIRE_SM90_TILE"); }

  template <class Case, class Candidates>
  void expect_same_bits(const Case& fresh, Candidates candidates) {
    const Case chosen = fresh;
    ASSERT_TRUE(succeeds(chosen.run(alone())));
    for (const std::string& tile : texts_of(candidates)) {
      SCOPED_TRACE(tile);
      ASSERT_EQ(setenv("MOIRE_SM90_TILE", tile.c_str(), 1), 0);
      const Case asked = fresh;
      EXPECT_NE(policy(asked.args()).find(tile), std::string::npos) << policy(asked.args());
      ASSERT_TRUE(succeeds(asked.run(alone())));
      asked.expect_same(chosen);
      EXPECT_TRUE(asked.is_undamaged());
    }
    unsetenv("MOIRE_SM90_TILE");
  }
};

TEST_F(Tiles, GiveTheSameBitsWhicheverIsAskedFor) {
  Random random;
  const Batch batch({70, 0, 129, 5, 300, 577, 64, 193, 1}, 9);
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    GemmOptions o;
    o.operands = o.output = DType::kBF16;
    o.layout = layout;
    SCOPED_TRACE(layout);
    expect_same_bits(GemmCase(random, batch, 520, 400, false, o), cuda::sm90::ProductTiles());
    expect_same_bits(GemmCase(random, batch, 520, 400, true, o), cuda::sm90::ProductTiles());
    expect_same_bits(WgradCase(random, batch, 520, 400, o), cuda::sm90::Bf16WgradTiles());
    o.output = DType::kFP32;
    o.beta = 1;
    expect_same_bits(WgradCase(random, batch, 520, 400, o), cuda::sm90::Fp32WgradTiles());
  }
  GemmOptions o;
  o.operands = o.output = DType::kBF16;
  expect_same_bits(GemmGluCase(random, batch, 392, 400, o), cuda::sm90::GluTiles());
  expect_same_bits(GemmGluBackwardCase(random, batch, 392, 400, o), cuda::sm90::GluBackwardTiles());
}

}  // namespace
}  // namespace moire::test
