// Which tile a problem gets on SM90: a pure function, so it is judged without a GPU.
#include <gtest/gtest.h>

#include <string>

#include "backend/cuda/sm90/grouped_gemm_heuristics.h"

namespace moire::cuda::sm90 {
namespace {

int tile_m(int64_t n, int64_t mean_rows) {
  return with_tile(n, mean_rows, []<class P>() { return P::kTileM; });
}
int tile_n(int64_t n, int64_t mean_rows) {
  return with_tile(n, mean_rows, []<class P>() { return P::kTileN; });
}

TEST(Sm90Heuristics, TallTilesWaitForManyRowsAGroup) {
  EXPECT_EQ(tile_m(4096, 2048), 192);
  EXPECT_EQ(tile_m(4096, 1024), 128);
  EXPECT_EQ(tile_m(4096, 0), 128);
}

TEST(Sm90Heuristics, NarrowTilesServeWidthsThatWideOnesWaste) {
  EXPECT_EQ(tile_n(2880, 256), 192);  // 15 x 192, but 11.25 x 256
  EXPECT_EQ(tile_n(768, 256), 256);
  EXPECT_EQ(tile_n(2048, 256), 256);
  EXPECT_EQ(tile_n(192, 256), 192);
  EXPECT_EQ(tile_n(8, 256), 192);
}

TEST(Sm90Heuristics, WgradTakesSlotsForFp32AndTallTilesOtherwise) {
  const auto slots = [](int64_t n, bool is_fp32) {
    return with_wgrad_tile(n, is_fp32, []<class P>() { return P::kNumSlots; });
  };
  const auto rows = [](int64_t n, bool is_fp32) {
    return with_wgrad_tile(n, is_fp32, []<class P>() { return P::kTileM; });
  };
  EXPECT_GE(slots(2048, true), 5);
  EXPECT_GE(slots(2880, true), 5);
  EXPECT_EQ(rows(2048, false), 192);
  EXPECT_EQ(rows(2048, true), 128);
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
  check.operator()<WideTile>();
  check.operator()<NarrowTile>();
  check.operator()<GluTile>();
  check.operator()<WideGluBackwardTile>();
  check.operator()<NarrowGluBackwardTile>();
  check.operator()<WideWgradTile>();
  check.operator()<NarrowWgradTile>();
}

}  // namespace
}  // namespace moire::cuda::sm90
