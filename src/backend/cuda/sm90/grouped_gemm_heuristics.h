// Which policy an instance runs with: a pure function of the problem.
#pragma once

#include <cstdint>
#include <utility>

#include "backend/cuda/sm90/grouped_gemm_policies.h"
#include "core/divide.h"

namespace moire::cuda::sm90 {

// The tall tile loads least per product, which counts where the L2 is the limit; the wide one
// wastes less at the ends of groups; the narrow one where n is no multiple of 256. One H200,
// TFLOP/s of fc1 in BF16, tall and wide: 650 and 539 at 2048 rows a group (mixtral), 527 and 560 at
// 1024 (dsv3), 460 and 506 at 512 (qwen3).
using TallTile = Policy<256, 3, 2, 3>;
using WideTile = Policy<256, 4, 2>;
using NarrowTile = Policy<192, 4, 4>;

// Unless it computes more than 4 % more columns.
inline bool prefers_narrow_tile(int64_t n) {
  return round_up(n, WideTile::kTileN) * 100 > round_up(n, NarrowTile::kTileN) * 104;
}

// `mean_rows` of a group if the capacity is in use. Calls f.operator()<Policy>().
template <class F>
decltype(auto) with_tile(int64_t n, int64_t mean_rows, F&& f) {
  constexpr int64_t kManyRows = 1536;
  if (prefers_narrow_tile(n)) return std::forward<F>(f).template operator()<NarrowTile>();
  if (mean_rows >= kManyRows) return std::forward<F>(f).template operator()<TallTile>();
  return std::forward<F>(f).template operator()<WideTile>();
}

// FC1: 128 gate and 128 up columns.
using GluTile = Policy<256, 3, 5>;

// FC2's dgrad with the activation's backward: z needs the slots.
using WideGluBackwardTile = Policy<256, 3, 5>;
using NarrowGluBackwardTile = Policy<192, 3, 6>;
using PingPong = Policy<128, 4, 6, 2, true>;

template <class F>
decltype(auto) with_glu_backward_tile(int64_t f_columns, F&& f) {
  if (round_up(f_columns, NarrowGluBackwardTile::kTileN) * 100 <= f_columns * 104) {
    return std::forward<F>(f).template operator()<NarrowGluBackwardTile>();
  }
  return std::forward<F>(f).template operator()<WideGluBackwardTile>();
}

// wgrad: no rows are ragged there, so the tall tile costs nothing; but where FP32 is accumulated,
// slots are needed to prefetch what the gradient holds.
using WideWgradTile = Policy<256, 3, 5>;
using NarrowWgradTile = Policy<192, 3, 6>;

template <class F>
decltype(auto) with_wgrad_tile(int64_t n, bool is_fp32, F&& f) {
  if (prefers_narrow_tile(n)) return std::forward<F>(f).template operator()<NarrowWgradTile>();
  if (is_fp32) return std::forward<F>(f).template operator()<WideWgradTile>();
  return std::forward<F>(f).template operator()<TallTile>();
}

}  // namespace moire::cuda::sm90
