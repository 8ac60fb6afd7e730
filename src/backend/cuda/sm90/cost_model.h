// What a grouped product costs with a policy's tile, in clocks of a multiprocessor: what the
// choice of tiles rests on (grouped_gemm_heuristics.h), and what `explain` prints of it.
//
// A step of 64 in K takes as long as its products, or its bytes at the rate at which they come;
// every byte besides costs energy, which under a power limit comes back as clock. On top come what
// padding, overhang, epilogue and the last wave cost. Splits are on the device: rows of a group are
// a mean, so a group's last row tile is half full, and so is the last wave.
//
// The constants are fitted to ratios between tiles measured on one H200, which
// sm90_heuristics_test.cpp has beside the model's.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/divide.h"
#include "core/format.h"

namespace moire::cuda::sm90 {

// [m, k] x [k, n] in each group.
struct ProductSizes {
  int64_t num_groups;
  double m;
  int64_t n;
  double k;
  bool is_ragged_m;  // m is a mean, each group ends inside a tile; else k is

  // The weights are all that takes time, then.
  bool has_few_rows() const { return is_ragged_m && m <= 16 && k >= 256; }
};

struct Cost {
  double useful_rows, useful_columns;  // of those that take time
  double bytes_per_clock;              // of operands, at the full rate of the tensor cores
  double waves;
  double clocks;
  int blocks;  // one a multiprocessor, but no more than there may be tiles

  std::string text() const {
    const auto tenths = static_cast<int64_t>(10 * waves + 0.5);
    return concat("rows ", percent(useful_rows), " and columns ", percent(useful_columns),
                  " useful, ", static_cast<int>(bytes_per_clock + 0.5), " bytes a clock, ",
                  tenths / 10, ".", tenths % 10, " waves");
  }

 private:
  static std::string percent(double share) {
    return concat(static_cast<int>(100 * share + 0.5), " %");
  }
};

template <class P>
struct CostModel {
  const ProductSizes& sizes;

  Cost cost(int num_multiprocessors) const {
    const double column_tiles = static_cast<double>(ceil_div(sizes.n, int64_t{P::kTileN}));
    const double row_tiles = sizes.is_ragged_m ? std::max(1.0, sizes.m / P::kTileM + 0.5)
                                               : std::ceil(sizes.m / P::kTileM);
    const double in_last = last_rows();
    const double groups = static_cast<double>(sizes.num_groups);
    const double work =
        groups * column_tiles * ((row_tiles - 1) * tile_clocks(P::kTileM) + tile_clocks(in_last));
    Cost cost{};
    cost.useful_rows = sizes.m / ((row_tiles - 1) * P::kTileM + in_last);
    cost.useful_columns = static_cast<double>(sizes.n) / (column_tiles * P::kTileN);
    cost.bytes_per_clock = kStageBytes / products(P::kTileM);
    cost.waves = groups * column_tiles * row_tiles / num_multiprocessors;
    cost.clocks = work / num_multiprocessors + tile_clocks(P::kTileM) / 2;
    // No model of it: few rows' weights come soonest by many tiles with many stages each.
    if (P::kShape.is_thin) cost.clocks = sizes.has_few_rows() ? 0 : HUGE_VAL;
    // Of groups that all end in a tile, and of a tail. Without groups no number says how many.
    const double most = column_tiles * (sizes.is_ragged_m ? groups * (sizes.m / P::kTileM + 1) + 1
                                                          : groups * row_tiles);
    cost.blocks = static_cast<int>(std::max(1.0, std::min<double>(num_multiprocessors, most)));
    return cost;
  }

 private:
  static constexpr double kStageBytes = P::kABytes + P::kBBytes;
  static constexpr double kBytesPerClock = 60;  // that come at most
  static constexpr double kRowBlock = 64;
  static constexpr double kClocksPerByte = 1.0 / 500;
  // Side by side, a warpgroup's products end before it issues the next, and the first products of
  // a tile wait for the sums of the last.
  static constexpr double kDrain = 50, kExposedEpilogue = P::kIsLeftOver ? 1500 : 2000;
  // Of a ping-pong tile, while the other warpgroup multiplies.
  static constexpr double kEpilogue = 6000;

  // Of a stage: 128 bytes in K of either type take as long.
  static double products(double rows) { return rows * P::kTileN * P::kTileKBytes / 4096; }

  // Rows that take time in a group's last row tile. A ping-pong turn of half a tile is no shorter:
  // it waits for its bytes, and nobody multiplies meanwhile.
  double last_rows() const {
    if (!sizes.is_ragged_m || P::kIsPingPong) return P::kTileM;
    return std::min<double>(P::kTileM, std::min(sizes.m, P::kTileM / 2.0) + kRowBlock / 2);
  }
  double tile_clocks(double rows) const {
    const double steps =
        sizes.is_ragged_m ? std::ceil(sizes.k / P::kTileK) : sizes.k / P::kTileK + 0.5;
    const double step =
        std::max(products(rows), kStageBytes / kBytesPerClock) + kStageBytes * kClocksPerByte;
    if (!P::kIsPingPong) return steps * (step + kDrain) + kExposedEpilogue;
    return std::max(steps * step, (steps * step + kEpilogue) / 2);
  }
};

template <class P>
Cost cost_of(const ProductSizes& sizes, int num_multiprocessors) {
  return CostModel<P>{sizes}.cost(num_multiprocessors);
}

}  // namespace moire::cuda::sm90
