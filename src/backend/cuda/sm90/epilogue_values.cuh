// What epilogues read straight from memory: a row's prob or scale, a column's bias.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <moire/tensor.h>

#include "backend/cuda/device/tile_walk.cuh"

namespace moire::cuda::sm90 {

// [groups, columns] of FP32, BF16 or FP16; data null where absent.
struct Bias {
  const void* data;
  int32_t dtype;
  int64_t stride;

  explicit Bias(const TensorView& t)
      : data(t.is_present() ? t.data : nullptr), dtype(t.dtype), stride(t.stride()) {}

  __device__ bool is_present() const { return data != nullptr; }
  __device__ float at(int32_t group, int64_t column) const {
    const int64_t i = group * stride + column;
    if (dtype == MOIRE_FP32) return static_cast<const float*>(data)[i];
    if (dtype == MOIRE_BF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    return __half2float(static_cast<const __half*>(data)[i]);
  }
};

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
