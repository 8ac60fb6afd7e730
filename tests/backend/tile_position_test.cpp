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
      std::set<std::pair<int32_t, int32_t>> seen;
      for (int32_t i = 0; i < tiles_m * tiles_n; ++i) {
        const TilePosition p = tile_position(i, tiles_m, tiles_n);
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
  EXPECT_EQ(tile_position(0, 4, 3).m, 0);
  EXPECT_EQ(tile_position(3, 4, 3).m, 3);
  EXPECT_EQ(tile_position(3, 4, 3).n, 0);
  EXPECT_EQ(tile_position(4, 4, 3).m, 0);
  EXPECT_EQ(tile_position(4, 4, 3).n, 1);
}

TEST(TilePosition, CutsThirteenRowTilesIntoSevenAndSix) {
  const int32_t tiles_n = 2;
  int32_t first_band = 0;
  for (int32_t i = 0; i < 7 * tiles_n; ++i) {
    first_band = std::max(first_band, tile_position(i, 13, tiles_n).m);
  }
  EXPECT_EQ(first_band, 6);
  EXPECT_EQ(tile_position(7 * tiles_n, 13, tiles_n).m, 7);
}

}  // namespace
}  // namespace moire::cuda
