// Which tile a problem gets on SM90: a pure function, so it is judged without a GPU.
#include <gtest/gtest.h>

#include <string>

#include "backend/cuda/sm90/grouped_gemm_heuristics.h"

namespace moire::cuda::sm90 {
namespace {

constexpr int64_t kLongSum = 4096;

int tile_m(int64_t n, int64_t mean_rows) {
  return with_tile(n, kLongSum, mean_rows, []<class P>() { return P::kTileM; });
}
int tile_n(int64_t n, int64_t mean_rows) {
  return with_tile(n, kLongSum, mean_rows, []<class P>() { return P::kTileN; });
}

TEST(Sm90Heuristics, TallTilesWaitForManyRowsAGroup) {
  for (const int64_t n : {int64_t{4096}, int64_t{2880}}) {
    EXPECT_EQ(tile_m(n, 2048), 192);
    EXPECT_EQ(tile_m(n, 512), 192);
    EXPECT_EQ(tile_m(n, 256), 128);
    EXPECT_EQ(tile_m(n, 0), 128);
  }
}

TEST(Sm90Heuristics, NarrowTilesServeWidthsThatWideOnesWaste) {
  for (const int64_t rows : {256, 1024}) {
    EXPECT_EQ(tile_n(2880, rows), 192);  // 15 x 192, but 11.25 x 256
    EXPECT_EQ(tile_n(768, rows), 256);
    EXPECT_EQ(tile_n(2048, rows), 256);
    EXPECT_EQ(tile_n(192, rows), 192);
    EXPECT_EQ(tile_n(8, rows), 192);
  }
}

TEST(Sm90Heuristics, ShortSumsAlternateUnlessTheirTileWastesColumns) {
  const auto alternates = [](int64_t n, int64_t k) {
    return with_tile(n, k, 512, []<class P>() { return P::kAlternates; });
  };
  EXPECT_TRUE(alternates(2048, 768));
  EXPECT_TRUE(alternates(2048, 2048));
  EXPECT_FALSE(alternates(2048, 2056));
  EXPECT_FALSE(alternates(1024, 768));  // 6 x 192 are an eighth more
  EXPECT_FALSE(alternates(8, 8));
}

TEST(Sm90Heuristics, WgradIsTallUnlessItLoadsOldGradients) {
  const auto alternates = [](int64_t n, bool is_fp32) {
    return with_wgrad_tile(n, is_fp32, []<class P>() { return P::kAlternates; });
  };
  const auto rows = [](int64_t n, bool is_fp32) {
    return with_wgrad_tile(n, is_fp32, []<class P>() { return P::kTileM; });
  };
  for (const int64_t n : {int64_t{2048}, int64_t{2880}}) {
    EXPECT_TRUE(alternates(n, true));
    EXPECT_EQ(rows(n, true), 128);
    EXPECT_FALSE(alternates(n, false));
    EXPECT_EQ(rows(n, false), 192);
  }
}

TEST(Sm90Heuristics, EveryPolicyFitsIntoAMultiprocessor) {
  static constexpr int kSharedBytes = 227 * 1024, kBarriersAndAlignment = 3 * 1024,
                       kRegisters = 65536;
  const auto check = []<class P>() {
    EXPECT_LE(P::kNumStages * (P::kABytes + P::kBBytes) +
                  P::kConsumerWarps * P::kNumSlots * P::kSlotBytes + kBarriersAndAlignment,
              kSharedBytes)
        << P::text();
    EXPECT_LE(128 * P::kProducerRegisters + 128 * P::kConsumers * P::kConsumerRegisters, kRegisters)
        << P::text();
  };
  check.operator()<TallTile>();
  check.operator()<LowTile>();
  check.operator()<NarrowTallTile>();
  check.operator()<NarrowLowTile>();
  check.operator()<ShortSumTile>();
  check.operator()<GluTile>();
  check.operator()<LoadingEpilogueTile>();
}

}  // namespace
}  // namespace moire::cuda::sm90
