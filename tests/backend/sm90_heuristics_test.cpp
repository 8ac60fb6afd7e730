// Which tile a problem gets on SM90, and what the cost model says of it: pure functions, so they
// are judged without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <type_traits>

#include "backend/cuda/sm90/grouped_gemm_heuristics.h"

namespace moire::cuda::sm90 {
namespace {

constexpr int kMultiprocessors = 132;

moire_groups groups(int64_t count, int64_t rows) { return {nullptr, count, count * rows}; }

template <class Expected, class Tiles>
void expect_tile(Tiles tiles, const ProductSizes& sizes) {
  const std::string got =
      with_cheapest(tiles, sizes, kMultiprocessors, []<class P>(const Cost&) { return P::text(); });
  EXPECT_EQ(got, Expected::text())
      << "n = " << sizes.n << ", k = " << sizes.k << ", m = " << sizes.m;
}
template <class Expected>
void expect_product(int64_t num_groups, int64_t rows, int64_t n, int64_t k) {
  expect_tile<Expected>(ProductTiles(), ragged_m_sizes(groups(num_groups, rows), n, k));
}
template <class Expected>
void expect_wgrad(int64_t num_groups, int64_t rows, int64_t m, int64_t n) {
  expect_tile<Expected>(Bf16WgradTiles(), ragged_k_sizes(groups(num_groups, rows), m, n));
}
template <class P>
Cost product_cost(int64_t num_groups, int64_t rows, int64_t n, int64_t k) {
  return cost_of<P>(ragged_m_sizes(groups(num_groups, rows), n, k), kMultiprocessors);
}

template <class Expected>
void expect_fc1_glu(int64_t num_groups, int64_t rows, int64_t f, int64_t hidden) {
  expect_tile<Expected>(GluTiles(), ragged_m_sizes(groups(num_groups, rows), 2 * f, hidden));
}
template <class Expected>
void expect_glu_backward(int64_t num_groups, int64_t rows, int64_t f, int64_t hidden) {
  expect_tile<Expected>(GluBackwardTiles(), ragged_m_sizes(groups(num_groups, rows), f, hidden));
}

// As measured in steady state (docs/kernels/sm90_grouped_gemm.md, "The cost model").
TEST(Sm90Heuristics, TrainingShapesGetTheTilesThatWereMeasuredBest) {
  expect_product<TallTile>(8, 2048, 4096, 14336);        // mixtral fc2
  expect_product<TallTile>(8, 2048, 4096, 28672);        // and fc1 dgrad
  expect_product<PingPongTile>(32, 1024, 7168, 2048);    // dsv3
  expect_product<TallTile>(32, 1024, 7168, 4096);        //
  expect_product<PingPongTile>(128, 512, 2048, 768);     // qwen3
  expect_product<PingPongTile>(64, 1024, 2048, 1024);    // olmoe
  expect_product<PingPongTile>(128, 256, 2880, 2880);    // gpt-oss
  expect_product<NarrowTallTile>(128, 256, 2880, 5760);  //
  expect_wgrad<PingPongTile>(8, 2048, 28672, 4096);      // mixtral fc1
  expect_wgrad<PingPongTile>(8, 2048, 4096, 14336);      // and fc2
  expect_wgrad<PingPongTile>(32, 1024, 4096, 7168);      // dsv3
  expect_wgrad<PingPongTile>(32, 1024, 7168, 2048);      //
  expect_wgrad<PingPongTile>(128, 512, 1536, 2048);      // qwen3
  expect_wgrad<PingPongTile>(128, 512, 2048, 768);       //
  expect_wgrad<PingPongTile>(64, 1024, 2048, 2048);      // olmoe
  expect_wgrad<TallTile>(64, 1024, 2048, 1024);          // 4 x 256, but 5.33 x 192
  expect_wgrad<PingPongTile>(128, 256, 5760, 2880);      // gpt-oss
  expect_wgrad<PingPongTile>(128, 256, 2880, 2880);      //
}

TEST(Sm90Heuristics, FewRowsGetThinTilesUnlessTheSumIsShort) {
  for (const int64_t rows : {1, 2, 16}) {
    expect_product<ThinTile>(8, rows, 4096, 14336);
    expect_product<ThinTile>(128, rows, 2048, 768);
    expect_fc1_glu<ThinGluTile>(128, rows, 768, 2048);
  }
  expect_tile<ThinTile>(ProductTiles(), ragged_m_sizes({nullptr, 128, 8}, 2048, 768));  // a token
  expect_tile<DecodingThinTile>(DecodingTiles(), ragged_m_sizes(groups(8, 16), 4096, 14336));
  expect_tile<DecodingTile>(DecodingTiles(), ragged_m_sizes(groups(8, 17), 4096, 14336));
  expect_tile<DecodingThinTile>(TurnedDecodingTiles(), ragged_m_sizes(groups(8, 1), 4096, 256));
  expect_product<LowTile>(128, 16, 2048, 192);
  expect_product<LowTile>(8, 17, 4096, 14336);
  expect_glu_backward<WideLoadingEpilogueTile>(128, 2, 768, 2048);  // has none
}

TEST(Sm90Heuristics, EveryCandidateIsSomeProblemsBest) {
  expect_product<LowTile>(20, 20, 200, 64);
  expect_product<NarrowLowTile>(4, 53, 192, 72);
  expect_product<NarrowTallTile>(20, 140, 320, 64);
  expect_product<TallTile>(60, 100, 200, 64);
  expect_product<PingPongTile>(4, 53, 192, 200);
  expect_wgrad<NarrowTallTile>(4, 53, 192, 192);
  expect_wgrad<TallTile>(4, 53, 400, 256);
  expect_wgrad<PingPongTile>(4, 53, 128, 136);
}

TEST(Sm90Heuristics, FusedActivationsPingPongUnlessTheSumIsLongOrFOverhangs) {
  expect_fc1_glu<PingPongGluTile>(8, 2048, 14336, 4096);               // mixtral
  expect_fc1_glu<GluTile>(32, 1024, 2048, 7168);                       // dsv3
  expect_fc1_glu<PingPongGluTile>(128, 512, 768, 2048);                // qwen3
  expect_fc1_glu<PingPongGluTile>(64, 1024, 1024, 2048);               // olmoe
  expect_fc1_glu<PingPongGluTile>(128, 256, 2880, 2880);               // gpt-oss
  expect_glu_backward<WideLoadingEpilogueTile>(8, 2048, 14336, 4096);  // mixtral
  expect_glu_backward<WideLoadingEpilogueTile>(32, 1024, 2048, 7168);  // dsv3
  expect_glu_backward<WideLoadingEpilogueTile>(128, 512, 768, 2048);   // qwen3
  expect_glu_backward<LoadingEpilogueTile>(64, 1024, 1024, 2048);      // olmoe: 5.33 x 192
  expect_glu_backward<WideLoadingEpilogueTile>(128, 256, 2880, 2880);  // gpt-oss
}

// How much faster P was than Other.
template <class P, class Other>
void expect_measured(double measured, int64_t num_groups, int64_t rows, int64_t n, int64_t k) {
  constexpr double kTolerance = 0.035;
  const double modelled = product_cost<Other>(num_groups, rows, n, k).clocks /
                          product_cost<P>(num_groups, rows, n, k).clocks;
  EXPECT_NEAR(modelled, measured, kTolerance) << "n = " << n << ", k = " << k;
}

TEST(Sm90Heuristics, TheModelKeepsTheMeasuredRatios) {
  expect_measured<TallTile, LowTile>(640.0 / 620, 32, 1024, 4096, 7168);
  expect_measured<TallTile, LowTile>(581.0 / 551, 128, 512, 1536, 2048);
  expect_measured<PingPongTile, TallTile>(536.0 / 512, 128, 512, 2048, 768);
  expect_measured<PingPongTile, TallTile>(580.0 / 561, 64, 1024, 2048, 1024);
  expect_measured<PingPongTile, TallTile>(590.0 / 587, 64, 1024, 2048, 2048);
  expect_measured<PingPongTile, TallTile>(602.0 / 601, 32, 1024, 7168, 2048);
  expect_measured<PingPongTile, TallTile>(602.0 / 615, 32, 1024, 4096, 7168);
  expect_measured<PingPongTile, NarrowTallTile>(473.0 / 472, 128, 256, 2880, 2880);
  expect_measured<PingPongTile, NarrowTallTile>(465.0 / 484, 128, 256, 2880, 5760);
}

TEST(Sm90Heuristics, TheModelKeepsTheMeasuredRatiosOfFusedActivations) {
  expect_measured<PingPongGluTile, GluTile>(6352.0 / 6255, 8, 2048, 28672, 4096);
  expect_measured<PingPongGluTile, GluTile>(3267.0 / 3336, 32, 1024, 4096, 7168);
  expect_measured<PingPongGluTile, GluTile>(818.0 / 777, 128, 512, 1536, 2048);
  expect_measured<PingPongGluTile, GluTile>(1016.0 / 989, 64, 1024, 2048, 2048);
  expect_measured<PingPongGluTile, GluTile>(2362.0 / 2312, 128, 256, 5760, 2880);
  using Wide = WideLoadingEpilogueTile;
  expect_measured<Wide, LoadingEpilogueTile>(3700.0 / 3388, 8, 2048, 14336, 4096);
  expect_measured<Wide, LoadingEpilogueTile>(1835.0 / 1754, 32, 1024, 2048, 7168);
  expect_measured<Wide, LoadingEpilogueTile>(629.0 / 663, 64, 1024, 1024, 2048);
  expect_measured<Wide, LoadingEpilogueTile>(1431.0 / 1301, 128, 256, 2880, 2880);
}

TEST(Sm90Heuristics, MoreOfAnythingNeverCostsLess) {
  for (const int64_t size : {8, 64, 200, 768, 2880, 4096}) {
    const double cost = product_cost<TallTile>(4, size, size, size).clocks;
    EXPECT_GE(product_cost<TallTile>(5, size, size, size).clocks, cost);
    EXPECT_GE(product_cost<TallTile>(4, size + 64, size, size).clocks, cost);
    EXPECT_GE(product_cost<TallTile>(4, size, size + 64, size).clocks, cost);
    EXPECT_GE(product_cost<TallTile>(4, size, size, size + 64).clocks, cost);
  }
  EXPECT_GT(product_cost<TallTile>(4, 0, 8, 8).clocks, 0);  // no rows are known of
}

TEST(Sm90Heuristics, CostSaysWhatIsUseful) {
  const Cost cost = product_cost<TallTile>(8, 2048, 4000, 14336);
  EXPECT_EQ(cost.text(), "rows 98 % and columns 98 % useful, 37 bytes a clock, 10.8 waves");
}

// A block whose tile may be there is launched; those of few tiles leave the others'
// multiprocessors.
TEST(Sm90Heuristics, ThereAreNoMoreBlocksThanTilesAndNoFewerThanTheyNeed) {
  std::mt19937 random(std::random_device{}());
  const auto up_to = [&](int64_t most) { return static_cast<int64_t>(random() % (most + 1)); };
  for (int i = 0; i < 1000; ++i) {
    const int64_t num_groups = 1 + up_to(20), n = 8 * (1 + up_to(60)), k = 8 * (1 + up_to(60));
    moire_groups given{nullptr, num_groups, 0};
    int64_t tiles = 0;
    const auto take = [&](int64_t rows) {
      given.capacity += rows;
      tiles += ceil_div(rows, LowTile::kTileM) * ceil_div(n, LowTile::kTileN);
    };
    for (int64_t g = 0; g <= num_groups; ++g) take(up_to(3) == 0 ? 0 : up_to(400));  // and a tail
    const int blocks = cost_of<LowTile>(ragged_m_sizes(given, n, k), kMultiprocessors).blocks;
    EXPECT_GE(blocks, std::min<int64_t>(tiles, kMultiprocessors));
    EXPECT_LE(blocks, kMultiprocessors);
    const int of_wgrad = cost_of<LowTile>(ragged_k_sizes(given, n, k), kMultiprocessors).blocks;
    const int64_t outputs = ceil_div(n, LowTile::kTileM) * ceil_div(k, LowTile::kTileN);
    EXPECT_EQ(of_wgrad, std::min<int64_t>(num_groups * outputs, kMultiprocessors));
  }
  EXPECT_EQ(product_cost<LowTile>(2, 16, 256, 64).blocks, 3);  // each group's, and a tail's
  EXPECT_EQ(product_cost<LowTile>(0, 0, 256, 64).blocks, kMultiprocessors);  // all is tail
}

TEST(Sm90Heuristics, Fp32GradientsPingPongInTheWiderTileUnlessItOverhangs) {
  const auto expect = []<class Expected>(Expected, int64_t num_groups, int64_t rows, int64_t m,
                                         int64_t n) {
    expect_tile<BoxesOfWarps<Expected>>(Fp32WgradTiles(),
                                        ragged_k_sizes(groups(num_groups, rows), m, n));
  };
  expect(PingPongTile(), 8, 2048, 28672, 4096);         // mixtral
  expect(PingPongTile(), 32, 1024, 7168, 2048);         // dsv3
  expect(PingPongTile(), 128, 512, 1536, 2048);         // qwen3
  expect(PingPongTile(), 64, 1024, 2048, 2048);         // olmoe
  expect(LoadingEpilogueTile(), 64, 1024, 2048, 1024);  // 8 x 128, but 5.33 x 192
  expect(PingPongTile(), 128, 256, 5760, 2880);         // gpt-oss
}

template <class P>
void expect_fits() {
  static constexpr int kSharedBytes = 227 * 1024, kBarriersAndAlignment = 3 * 1024,
                       kRegisters = 65536;
  EXPECT_LE(P::kNumStages * (P::kABytes + P::kBBytes) +
                P::kBoxes * P::kNumBuffers * P::kBufferBytes + kBarriersAndAlignment,
            kSharedBytes)
      << P::text();
  EXPECT_LE(128 * P::kProducerRegisters + 128 * P::kConsumers * P::kConsumerRegisters, kRegisters)
      << P::text();
}
template <class... P>
void expect_all_fit(Candidates<P...>) {
  (expect_fits<P>(), ...);
}

TEST(Sm90Heuristics, EveryPolicyFitsIntoAMultiprocessor) {
  expect_all_fit(ProductTiles());
  expect_all_fit(Bf16WgradTiles());
  expect_all_fit(Fp32WgradTiles());
  expect_all_fit(GluTiles());
  expect_all_fit(GluBackwardTiles());
  expect_all_fit(DecodingTiles());
  expect_all_fit(TurnedDecodingTiles());
}

}  // namespace
}  // namespace moire::cuda::sm90
