// Where tile number `index` of a group lies among its tiles_m x tiles_n tiles: bands of about eight
// row tiles, rows fastest within a band, so that the blocks that work at one time share both
// operands in the L2. Host and device.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace moire::cuda {

struct TilePosition {
  int32_t m, n;
};

// Position of tile `index` of tiles_m x tiles_n.
MOIRE_HOST_DEVICE inline TilePosition tile_position(int32_t index, int32_t tiles_m,
                                                    int32_t tiles_n) {
  // Bands of equal height: a last one of two tiles would read all of B for them.
  constexpr int32_t kHighest = 11;
  const int32_t num_bands = (tiles_m + kHighest - 1) / kHighest;
  const int32_t full = (tiles_m + num_bands - 1) / num_bands;
  const int32_t first = index / (full * tiles_n) * full;
  const int32_t height = tiles_m - first < full ? tiles_m - first : full;
  index -= first * tiles_n;
  return {first + index % height, index / height};
}

}  // namespace moire::cuda
