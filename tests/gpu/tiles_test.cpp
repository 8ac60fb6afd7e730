// Every tile that the cost model may choose for Hopper's kernels, asked for by name: the same bits
// whichever it is.
#include <cmath>
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

  // Runs a case with each tile twice, the second time with NaN in all of one group's rows, which
  // lie in stages before and behind the others': `result` is the same but for that group.
  template <class Case, class Candidates>
  void expect_apart(const Case& fresh, TestTensor Case::*result, int64_t spoilt_group,
                    Candidates candidates) {
    const int64_t* const offsets = fresh.batch.groups().offsets;
    const int64_t begin = offsets[spoilt_group], end = offsets[spoilt_group + 1];
    for (const std::string& tile : texts_of(candidates)) {
      SCOPED_TRACE(tile);
      ASSERT_EQ(setenv("MOIRE_SM90_TILE", tile.c_str(), 1), 0);
      Case clean = fresh, spoilt = fresh;
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t i = 0; i < spoilt.a.rows.view().columns(); ++i) {
          spoilt.a.rows.set(row, i, std::nan(""));
        }
      }
      ASSERT_TRUE(succeeds(clean.run(alone())));
      ASSERT_TRUE(succeeds(spoilt.run(alone())));
      for (int64_t row = 0; row < fresh.batch.rows(); ++row) {
        for (int64_t i = 0; i < (clean.*result).view().columns(); ++i) {
          const double found = (spoilt.*result).get(row, i), wanted = (clean.*result).get(row, i);
          const bool is_spoilt = row >= begin && row < end;
          ASSERT_TRUE(is_spoilt ? std::isnan(found) : found == wanted) << row << ", " << i;
        }
      }
    }
    unsetenv("MOIRE_SM90_TILE");
  }
};

// Of small groups only boxes of a few rows are loaded, of whose stages the rest is what another
// tile left there.
TEST_F(Tiles, OfSmallGroupsTakeNothingFromOtherRows) {
  Random random;
  GemmOptions o;
  o.operands = o.output = DType::kBF16;
  for (const size_t groups : {40, 20, 10, 4}) {  // so that boxes have 8, 16, 32 and 64 rows
    std::vector<int64_t> splits = {3, 0, 66, 1, 5, 8, 0, 2, 9};
    splits.resize(groups);
    const Batch batch(splits, 9);
    SCOPED_TRACE(groups);
    for (const bool transposed : {false, true}) {
      expect_apart(GemmCase(random, batch, 200, 264, transposed, o), &GemmCase::d, 2,
                   cuda::sm90::ProductTiles());
    }
    expect_apart(GemmGluCase(random, batch, 200, 264, o), &GemmGluCase::act, 2,
                 cuda::sm90::GluTiles());
  }
}

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
