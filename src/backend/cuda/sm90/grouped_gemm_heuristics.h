// Which policy an instance runs with: a pure function of the problem.
#pragma once

#include <cstdint>
#include <utility>

#include "backend/cuda/sm90/grouped_gemm_policies.h"

namespace moire::cuda::sm90 {

// The tall tile loads least per product; the narrow one wastes less where n is no multiple of 256.
using TallTile = Policy<256, 3, 2, 3>;
using NarrowTile = Policy<192, 3, 3, 3>;

// Unless it computes more than 4 % more columns.
inline bool prefers_narrow_tile(int64_t n) {
  const auto padded = [n](int64_t tile) { return (n + tile - 1) / tile * tile; };
  return padded(TallTile::kTileN) * 100 > padded(NarrowTile::kTileN) * 104;
}

// Calls f.operator()<Policy>().
template <class F>
decltype(auto) with_tile_n(int64_t n, F&& f) {
  if (prefers_narrow_tile(n)) return std::forward<F>(f).template operator()<NarrowTile>();
  return std::forward<F>(f).template operator()<TallTile>();
}

// FC1: 128 gate and 128 up columns.
using GluTile = Policy<256, 3, 5>;

// FC2's dgrad with the activation's backward: z needs the slots.
using WideGluBackwardTile = Policy<256, 3, 5>;
using NarrowGluBackwardTile = Policy<192, 3, 6>;

template <class F>
decltype(auto) with_glu_backward_tile(int64_t f_columns, F&& f) {
  constexpr int64_t kNarrow = NarrowGluBackwardTile::kTileN;
  const int64_t padded = (f_columns + kNarrow - 1) / kNarrow * kNarrow;
  if (padded * 100 <= f_columns * 104) {
    return std::forward<F>(f).template operator()<NarrowGluBackwardTile>();
  }
  return std::forward<F>(f).template operator()<WideGluBackwardTile>();
}

// wgrad: where FP32 is accumulated, slots to prefetch what the gradient holds.
using WideWgradTile = Policy<256, 3, 5>;
using NarrowWgradTile = Policy<192, 3, 6>;

template <class F>
decltype(auto) with_wgrad_tile(int64_t n, bool is_fp32, F&& f) {
  if (!is_fp32) return with_tile_n(n, std::forward<F>(f));
  if (prefers_narrow_tile(n)) return std::forward<F>(f).template operator()<NarrowWgradTile>();
  return std::forward<F>(f).template operator()<WideWgradTile>();
}

}  // namespace moire::cuda::sm90
