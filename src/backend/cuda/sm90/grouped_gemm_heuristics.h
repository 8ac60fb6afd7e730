// Which policy an instance runs with: a pure function of the problem.
#pragma once

#include <cstdint>
#include <utility>

#include "backend/cuda/sm90/grouped_gemm_policies.h"
#include "core/divide.h"

namespace moire::cuda::sm90 {

// Plain products and BF16 weight gradients. The tall tiles load least per product; the low one
// wastes least at the ends of small groups; the narrow ones serve an n that is no multiple of 256.
// One H200, TFLOP/s of fc1, 192 and 128 rows high: 640 and 620 at 1024 rows a group (dsv3), 581 and
// 551 at 512 (qwen3).
using TallTile = Policy<256, 3, 2, 3>;
using LowTile = Policy<256, 4, 2>;
using NarrowTallTile = Policy<192, 3, 3, 3>;
using NarrowLowTile = Policy<192, 4, 4>;
// Short sums: one warpgroup multiplies while the other stores. TFLOP/s beside the tall tile: fc2 of
// qwen3 (K = 768) 536 and 512, of olmoe (K = 1024) 580 and 561, of dsv3 (K = 2048) 608 and 601, fc1
// dgrad of olmoe (K = 2048) 602 and 600; longer sums lose, fc1 of dsv3 (K = 7168) 602 and 615.
using ShortSumTile = Policy<192, 4, 3, 2, true>;

// Unless it computes more than 4 % more columns.
inline bool prefers_narrow_tile(int64_t n) {
  return round_up(n, TallTile::kTileN) * 100 > round_up(n, NarrowTallTile::kTileN) * 104;
}
inline bool prefers_short_sum_tile(int64_t n, int64_t k) {
  constexpr int64_t kShortSum = 2048;
  return k <= kShortSum && round_up(n, ShortSumTile::kTileN) * 100 <= n * 104;
}

// Of a product with [n, k] weights; `mean_rows` of a group if the capacity is in use. Calls
// f.operator()<Policy>().
template <class F>
decltype(auto) with_tile(int64_t n, int64_t k, int64_t mean_rows, F&& f) {
  constexpr int64_t kManyRows = 384;
  if (prefers_short_sum_tile(n, k)) return std::forward<F>(f).template operator()<ShortSumTile>();
  const bool is_tall = mean_rows >= kManyRows;
  if (prefers_narrow_tile(n)) {
    return is_tall ? std::forward<F>(f).template operator()<NarrowTallTile>()
                   : std::forward<F>(f).template operator()<NarrowLowTile>();
  }
  return is_tall ? std::forward<F>(f).template operator()<TallTile>()
                 : std::forward<F>(f).template operator()<LowTile>();
}

// FC1: 128 gate and 128 up columns; the slots hold all of a warp's z and a part of act.
using GluTile = Policy<256, 3, 5>;

// Epilogues that also load, where one warpgroup multiplies while the other stores: z of FC2's dgrad
// (391 TFLOP/s in turn and 340 side by side on qwen3, 534 and 504 on dsv3), the old gradients of an
// FP32 wgrad.
using LoadingEpilogueTile = Policy<128, 4, 6, 2, true>;
using GluBackwardTile = LoadingEpilogueTile;

// wgrad: no rows are ragged there, so the tall tile costs nothing. FP32 gradients, and they alone,
// get the tile in turn: 345 TFLOP/s on qwen3 and 467 on dsv3, where the tall one has 306 and 422.
template <class F>
decltype(auto) with_wgrad_tile(int64_t n, bool is_fp32, F&& f) {
  if (is_fp32) return std::forward<F>(f).template operator()<LoadingEpilogueTile>();
  if (prefers_narrow_tile(n)) return std::forward<F>(f).template operator()<NarrowTallTile>();
  return std::forward<F>(f).template operator()<TallTile>();
}

}  // namespace moire::cuda::sm90
