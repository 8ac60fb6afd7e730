// Which policy an instance runs with: a pure function of the problem.
#pragma once

#include <moire.h>

#include <cstdlib>
#include <utility>

#include "backend/cuda/sm90/cost_model.h"
#include "backend/cuda/sm90/grouped_gemm_policies.h"

namespace moire::cuda::sm90 {

// Of so many columns and staging buffers: three warpgroups' rows, and two that take turns.
constexpr Shape tall(int n, int buffers) {
  return {.tile_m = 192, .tile_n = n, .num_stages = 3, .num_buffers = buffers, .num_warpgroups = 3};
}
constexpr Shape ping_pong(int n, int buffers) {
  return {.tile_m = 128, .tile_n = n, .num_buffers = buffers, .schedule = Schedule::kPingPong};
}

// Plain products and BF16 weight gradients. Tall tiles load least per product; low ones waste least
// at the ends of small groups; narrow ones serve an n that is no multiple of 256; ping-pong hides
// the epilogue of short sums.
struct TallTile : Policy<tall(256, 2)> {};
struct LowTile : Policy<Shape{.tile_m = 128, .tile_n = 256, .num_buffers = 2}> {};
struct NarrowTallTile : Policy<tall(192, 3)> {};
struct NarrowLowTile : Policy<Shape{.tile_m = 128, .tile_n = 192, .num_buffers = 4}> {};
struct PingPongTile : Policy<ping_pong(192, 3)> {};
// Of few rows.
constexpr Shape thin(int n, int stages, int buffers) {
  Shape shape = ping_pong(n, buffers);
  shape.tile_m = 64, shape.num_stages = stages, shape.is_thin = true;
  return shape;
}
struct ThinTile : Policy<thin(64, 12, 1)> {};

// FC1: as many gate as up columns. Left over, the buffers hold z of the tile and a part of act;
// ping-pong, z of one row block.
struct GluTile : Policy<Shape{.tile_m = 128,
                              .tile_n = 256,
                              .num_stages = 3,
                              .num_buffers = 5,
                              .pieces = Pieces::kLeftOver}> {};
struct PingPongGluTile : Policy<ping_pong(192, 4)> {};
struct ThinGluTile : Policy<thin(128, 7, 3)> {};

// Epilogues that also load: z of FC2's dgrad, two pieces ahead or one; the old gradients of an FP32
// wgrad whose n is no multiple of 192.
struct LoadingEpilogueTile : Policy<ping_pong(128, 6)> {};
struct WideLoadingEpilogueTile : Policy<ping_pong(192, 4)> {};

// Products of FP8 with scales: a thread holds its FP32 sums, and those of 128 in K of one row
// block.
struct ScaledWideTile
    : Policy<Shape{.tile_m = 128, .tile_n = 192, .num_buffers = 3, .element_bytes = 1}> {};

// Weight gradients of FP8: every row of both operands has its scale. A third and a fourth staging
// buffer gain more than a fourth stage where they are in FP32: old values come to buffers while
// products are under way, and a tile has four pieces, which are sent off in the next one's time.
constexpr Shape scaled_wgrad(int stages, int buffers) {
  return {.tile_m = 192,
          .tile_n = 128,
          .num_stages = stages,
          .num_buffers = buffers,
          .num_warpgroups = 3,
          .element_bytes = 1,
          .scales_every_column = true};
}
struct ScaledBf16WgradTile : Policy<scaled_wgrad(4, 2)> {};
struct ScaledFp32WgradTile : Policy<scaled_wgrad(3, 4)> {};

// Products whose weights are decoded on their way to registers (decoding_main_loop.cuh). Of three
// warpgroups two multiply while one decodes; where k lies last a lane gathers its codes two by two,
// which is hidden by more products of each, and a stage more in registers.
struct DecodingTile
    : Policy<Shape{.tile_m = 256, .tile_n = 128, .num_buffers = 4, .decodes_weights = true}> {};
struct DecodingTallTile : Policy<Shape{.tile_m = 192,
                                       .tile_n = 192,
                                       .num_buffers = 3,
                                       .num_warpgroups = 3,
                                       .decodes_weights = true}> {};
// Of few rows, either way: of their weights more is under way.
struct DecodingThinTile : Policy<Shape{.tile_m = 128,
                                       .tile_n = 128,
                                       .num_stages = 8,
                                       .num_buffers = 1,
                                       .decodes_weights = true,
                                       .is_thin = true}> {};

// The policies that one instance can have.
template <class... P>
struct Candidates {};
using ProductTiles =
    Candidates<TallTile, LowTile, NarrowTallTile, NarrowLowTile, PingPongTile, ThinTile>;
using GluTiles = Candidates<GluTile, PingPongGluTile, ThinGluTile>;
using GluBackwardTiles = Candidates<LoadingEpilogueTile, WideLoadingEpilogueTile>;
using Bf16WgradTiles = Candidates<TallTile, NarrowTallTile, PingPongTile>;
using Fp32WgradTiles = Candidates<BoxesOfWarps<PingPongTile>, BoxesOfWarps<LoadingEpilogueTile>>;
using DecodingTiles = Candidates<DecodingTile, DecodingThinTile>;  // k last
using TurnedDecodingTiles = Candidates<DecodingTallTile, DecodingThinTile>;
using ScaledTiles = Candidates<BoxesOfWarps<ScaledWideTile>>;
using ScaledBf16WgradTiles = Candidates<BoxesOfWarps<ScaledBf16WgradTile>>;
using ScaledFp32WgradTiles = Candidates<BoxesOfWarps<ScaledFp32WgradTile>>;

// Groups that have rows, if as many have as can.
inline int64_t most_groups(const moire_groups& groups) {
  return groups.capacity == 0 ? groups.num_groups : std::min(groups.num_groups, groups.capacity);
}
// Of such a group, if the capacity is in use.
inline double mean_rows(const moire_groups& groups) {
  return static_cast<double>(groups.capacity) / static_cast<double>(most_groups(groups));
}
// Of a product of each group's rows, as far as the host knows them, with [n, k] weights.
inline ProductSizes ragged_m_sizes(const moire_groups& groups, int64_t n, int64_t k) {
  return {most_groups(groups), mean_rows(groups), n, static_cast<double>(k), true};
}
// Of an [m, n] sum over each group's rows.
inline ProductSizes ragged_k_sizes(const moire_groups& groups, int64_t m, int64_t n) {
  const double rows = static_cast<double>(groups.capacity);
  return {groups.num_groups, static_cast<double>(m), n,
          rows / static_cast<double>(groups.num_groups), false};
}

// Whether a policy's text has these words, of the environment's MOIRE_SM90_TILE.
template <class P>
bool is_asked_for(const char* words) {
  return words != nullptr && P::text().find(words) != std::string::npos;
}

// Calls f.operator()<P>(cost) with the candidate that is asked for, else costs least; of equals,
// the first.
template <class First, class... Others, class F>
decltype(auto) with_cheapest(Candidates<First, Others...>, const ProductSizes& sizes,
                             int num_multiprocessors, F&& f,
                             const char* asked = std::getenv("MOIRE_SM90_TILE")) {
  const Cost cost = cost_of<First>(sizes, num_multiprocessors);
  if constexpr (sizeof...(Others) == 0) {
    return std::forward<F>(f).template operator()<First>(cost);
  } else {
    const bool is_cheapest =
        (... && (cost.clocks <= cost_of<Others>(sizes, num_multiprocessors).clocks));
    if (is_asked_for<First>(asked) || (is_cheapest && !(... || is_asked_for<Others>(asked)))) {
      return std::forward<F>(f).template operator()<First>(cost);
    }
    return with_cheapest(Candidates<Others...>(), sizes, num_multiprocessors, std::forward<F>(f),
                         asked);
  }
}

}  // namespace moire::cuda::sm90
