// What epilogues read straight from memory: a row's prob or scale; and where its columns are.
#pragma once

#include "backend/cuda/device/tile_walk.cuh"
#include "backend/cuda/device/values.cuh"

namespace moire::cuda::sm90 {

// The values of this lane's two rows of [capacity]; 1 where absent or past the group's end.
struct RowValues {
  float first = 1, second = 1;

  RowValues() = default;
  __device__ RowValues(const float* values, const WorkTile& tile, int32_t first_m) {
    const int32_t row = first_m + static_cast<int32_t>(threadIdx.x) % 32 / 4;
    if (values == nullptr) return;
    if (row < tile.num_rows) first = values[tile.first_row + row];
    if (row + 8 < tile.num_rows) second = values[tile.first_row + row + 8];
  }
  __device__ float at(int half) const { return half == 0 ? first : second; }
};

// The first of this lane's two columns in column group j.
__device__ inline int32_t lane_column(int j) {
  return 8 * j + 2 * static_cast<int32_t>(threadIdx.x % 4);
}

// How many of kPieces pieces have columns, where `columns` are left from a tile's first on.
template <int kPieces>
__device__ inline int columns_as_pieces(int32_t columns, int piece) {
  return min(kPieces, (columns + piece - 1) / piece);
}

}  // namespace moire::cuda::sm90
