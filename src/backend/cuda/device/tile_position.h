// Where tile number `index` of a group lies among its tiles_m x tiles_n tiles: bands of row tiles,
// rows fastest within a band, so that the blocks that work at one time share both operands in the
// L2. Host and device.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace moire::cuda {

struct TilePosition {
  int32_t m, n;
};

// Into how many bands tiles_m row tiles are cut, of tile_m rows each and num_k steps along the
// contracted dimension, which are 128 bytes of a row. Every band reads the columns' operand anew,
// and its own rows with every column: the fewer bands, the less comes from memory, as long as a
// band's rows stay in the L2, where as much again passes by. Where they cannot, for K is long,
// bands are of eleven row tiles, so that the tiles at work at one time are as high as they are
// wide. Where the columns' operand, of so many bytes, can stay there instead, bands of one row tile
// read both but once.
MOIRE_HOST_DEVICE inline int32_t bands_of(int32_t tiles_m, int32_t tile_m, int32_t num_k,
                                          int64_t columns_bytes = INT64_MAX) {
  constexpr int32_t kLowest = 11;
  constexpr int64_t kBytes = 1 << 24, kStepBytes = 128, kStays = 24 << 20;
  const int32_t most = (tiles_m + kLowest - 1) / kLowest;
  const int64_t bytes = int64_t{tiles_m} * tile_m * num_k * kStepBytes;
  const int64_t wanted = (bytes + kBytes / 2) / kBytes;
  const int32_t bands = wanted >= most ? most : wanted > 1 ? static_cast<int32_t>(wanted) : 1;
  return bands > 1 && columns_bytes <= kStays ? tiles_m : bands;
}

MOIRE_HOST_DEVICE inline TilePosition tile_position(int32_t index, int32_t tiles_m, int32_t tiles_n,
                                                    int32_t num_bands) {
  // Bands of equal height: a last one of two tiles would read all of B for them.
  const int32_t full = (tiles_m + num_bands - 1) / num_bands;
  const int32_t first = index / (full * tiles_n) * full;
  const int32_t height = tiles_m - first < full ? tiles_m - first : full;
  index -= first * tiles_n;
  return {first + index % height, index / height};
}

}  // namespace moire::cuda
