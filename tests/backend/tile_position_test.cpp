// The order in which a block of the SM90 grouped GEMM walks the tiles of one group: a bijection, in
// bands that differ by one row tile at most. It is host-device code; the walks over groups run on
// the device only.
#include "backend/cuda/device/tile_position.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

namespace moire::cuda {
namespace {

TEST(TilePosition, VisitsEveryTileOnce) {
  for (const int32_t tiles_m : {1, 2, 7, 8, 11, 12, 13, 23, 100}) {
    for (const int32_t tiles_n : {1, 3, 16}) {
      const int32_t num_bands = (tiles_m + 10) / 11;
      std::set<std::pair<int32_t, int32_t>> seen;
      for (int32_t i = 0; i < tiles_m * tiles_n; ++i) {
        const TilePosition p = tile_position(i, tiles_m, tiles_n, num_bands);
        ASSERT_TRUE(p.m >= 0 && p.m < tiles_m && p.n >= 0 && p.n < tiles_n)
            << "tile " << i << " of " << tiles_m << " x " << tiles_n << " is " << p.m << ", "
            << p.n;
        seen.insert({p.m, p.n});
      }
      EXPECT_EQ(seen.size(), static_cast<size_t>(tiles_m * tiles_n));
    }
  }
}

TEST(TilePosition, GoesDownTheRowsOfABandBeforeTheNextColumn) {
  EXPECT_EQ(tile_position(0, 4, 3, 1).m, 0);
  EXPECT_EQ(tile_position(3, 4, 3, 1).m, 3);
  EXPECT_EQ(tile_position(3, 4, 3, 1).n, 0);
  EXPECT_EQ(tile_position(4, 4, 3, 1).m, 0);
  EXPECT_EQ(tile_position(4, 4, 3, 1).n, 1);
}

TEST(TilePosition, CutsThirteenRowTilesIntoSevenAndSix) {
  const int32_t tiles_n = 2;
  int32_t first_band = 0;
  for (int32_t i = 0; i < 7 * tiles_n; ++i) {
    first_band = std::max(first_band, tile_position(i, 13, tiles_n, 2).m);
  }
  EXPECT_EQ(first_band, 6);
  EXPECT_EQ(tile_position(7 * tiles_n, 13, tiles_n, 2).m, 7);
}

TEST(TilePosition, BandsAreAsHighAsTheirRowsStayInTheCache) {
  const auto bands = [](int32_t tiles_m, int32_t tile_m, int32_t k) {
    return bands_of(tiles_m, tile_m, k / 64);
  };
  EXPECT_EQ(bands(17, 128, 4096), 1);     // mixtral's FC1: 18 MB
  EXPECT_EQ(bands(26, 128, 4096), 2);     // 27 MB
  EXPECT_EQ(bands(17, 192, 28672), 2);    // its dgrad: nothing stays
  EXPECT_EQ(bands(32, 128, 2048), 1);     // wgrads, whose K is a group's rows: FC2's
  EXPECT_EQ(bands(224, 128, 2048), 7);    // FC1's
  EXPECT_EQ(bands(224, 128, 0), 1);       // of an empty group
  EXPECT_EQ(bands(0, 128, 4096), 0);      // has no tiles
  EXPECT_EQ(bands(12, 192, 1 << 22), 2);  // never lower than eleven
}

TEST(TilePosition, BandsAreOneTileHighWhereTheColumnsStayAndTheRowsDoNot) {
  const auto bands = [](int32_t tiles_m, int32_t k, int32_t columns) {
    return bands_of(tiles_m, 128, k / 64, int64_t{columns} * 2 * k);
  };
  EXPECT_EQ(bands(224, 2048, 4096), 224);  // mixtral's FC1 wgrad: 117 MB of rows, 17 of columns
  EXPECT_EQ(bands(224, 3236, 4096), 11);   // its longest group: 27 MB of columns
  EXPECT_EQ(bands(32, 2048, 14336), 1);    // FC2's: the rows stay
  EXPECT_EQ(bands(32, 1024, 7168), 1);     // DeepSeek-V3's FC1: both do
}

}  // namespace
}  // namespace moire::cuda
