// How grouped products are cut into tiles: every element in exactly one tile, tiles within their
// limits, enough of them.
#include <gtest/gtest.h>

#include <vector>

#include "backend/cpu/gemm/columns.h"
#include "backend/cpu/gemm/tiling.h"
#include "tests/support/ragged.h"

namespace moire::cpu::gemm {
namespace {

TEST(EvenBlock, IsTheSmallestStepThatNeedsNoMoreBlocks) {
  EXPECT_EQ(even_block(128, 128, 1), 128);
  EXPECT_EQ(even_block(130, 128, 1), 65);
  EXPECT_EQ(even_block(130, 128, 64), 128);
  EXPECT_EQ(even_block(1024, 384, 48), 384);
  EXPECT_EQ(even_block(0, 128, 16), 16);
}

class TilesOfRaggedRows : public testing::TestWithParam<test::RaggedCase> {};
INSTANTIATE_TEST_SUITE_P(Table, TilesOfRaggedRows, testing::ValuesIn(test::ragged_table()),
                         test::case_name);

TEST_P(TilesOfRaggedRows, CoverEveryElementOnce) {
  const test::Batch batch(GetParam());
  constexpr int64_t kColumns = 250, kStep = 96;
  for (const int64_t row_step : {1, 64}) {
    for (const int threads : {1, 2, 7}) {
      const TileLimits limits{128, 192};
      std::vector<int64_t> prefix(static_cast<size_t>(batch.num_groups() + 1));
      const RaggedRows tiles(batch.groups(), limits, row_step, kColumns, kStep, threads,
                             prefix.data());
      std::vector<int> seen(static_cast<size_t>(batch.capacity() * kColumns));
      for (int64_t task = 0; task < tiles.count(); ++task) {
        const Tile t = tiles.tile(task);
        const int64_t* offsets = batch.groups().offsets;
        ASSERT_GE(t.first_row, offsets[t.group]);
        ASSERT_LE(t.first_row + t.rows, offsets[t.group + 1]);
        ASSERT_EQ((t.first_row - offsets[t.group]) % row_step, 0);
        ASSERT_EQ(t.first_column % kStep, 0);
        ASSERT_TRUE(t.rows > 0 && t.rows <= limits.rows);
        ASSERT_TRUE(t.columns > 0 && t.columns <= limits.columns);
        for (int64_t i = t.first_row; i < t.first_row + t.rows; ++i) {
          for (int64_t j = t.first_column; j < t.first_column + t.columns; ++j) {
            ++seen[static_cast<size_t>(i * kColumns + j)];
          }
        }
      }
      for (size_t i = 0; i < seen.size(); ++i) {
        const bool in_use = static_cast<int64_t>(i) < batch.rows() * kColumns;
        ASSERT_EQ(seen[i], in_use ? 1 : 0) << "element " << i << " of " << kColumns << " columns";
      }
    }
  }
}

TEST(TileColumns, AreAsWideAsTheyMayBeForOneThreadAndNarrowerForMany) {
  EXPECT_EQ(tile_columns(8, 2048, 96, 1056, 1), 1056);
  EXPECT_LT(tile_columns(1, 2048, 96, 1056, 16), 200);
}

TEST(TileColumns, OfManyGroupsAreNotCut) { EXPECT_EQ(tile_columns(128, 768, 96, 1056, 2), 768); }

TEST(TileShape, GivesEveryThreadWorkAndKeepsItsLimits) {
  for (const int64_t size : {1, 96, 1000, 1024, 2880}) {
    for (const int threads : {1, 2, 16}) {
      const TileLimits shape = tile_shape(1, size, 48, size, 96, {384, 384}, threads);
      EXPECT_LE(shape.rows, 384);
      EXPECT_LE(shape.columns, 384);
      EXPECT_EQ(shape.rows % 48, 0);
      EXPECT_EQ(shape.columns % 96, 0);
      const int64_t tiles =
          ((size + shape.rows - 1) / shape.rows) * ((size + shape.columns - 1) / shape.columns);
      if (size >= 1000) {
        EXPECT_GE(tiles, threads);
      }
    }
  }
}

TEST(Columns, OfPairsBringGateAndUpTogether) {
  for (const moire_glu_layout layout :
       {moire_glu_layout{0, MOIRE_GATE_FIRST}, moire_glu_layout{1, MOIRE_UP_FIRST},
        moire_glu_layout{25, MOIRE_GATE_FIRST}}) {
    constexpr int64_t kF = 150;
    const ResolvedGluLayout resolved = resolve_glu_layout(layout, kF);
    const Columns columns = Columns::glu_pairs(resolved);
    for (int64_t j = 0; j < kF; ++j) {
      const int64_t chunk = j / kGluChunk * kGluChunk, width = columns.width(chunk);
      EXPECT_EQ(columns.source(2 * chunk + j - chunk), resolved.gate(j));
      EXPECT_EQ(columns.source(2 * chunk + width + j - chunk), resolved.up(j));
    }
  }
}

}  // namespace
}  // namespace moire::cpu::gemm
