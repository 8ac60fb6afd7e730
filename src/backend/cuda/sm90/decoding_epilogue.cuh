// The epilogue of sums whose lanes have two columns of pairs of rows (decoding_main_loop.cuh):
// plain store, not by pieces.
#pragma once

#include "backend/cuda/sm90/decoding_operands.cuh"
#include "backend/cuda/sm90/epilogue_values.cuh"
#include "backend/cuda/sm90/pieces.cuh"

namespace moire::cuda::sm90 {

// 64 rows of a warpgroup's columns into a buffer. Of row group j (8 rows), a lane holds rows
// 2 (lane % 4) and the next of its first column in sums[4 j] and [4 j + 1], of its second in the
// next two.
template <Major kWeights>
__device__ inline void write_turned(char* buffer, const float* sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  if constexpr (kWeights == Major::kK) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      Words words;
      pack_sums(sums + 4 * j, words);
      const int row = 8 * (j + lane / 16) + lane % 8, unit = 2 * warp + lane / 8 % 2;
      ptx::stmatrix_x4_transposed(ptx::shared_address(buffer) + swizzled(row, unit), words);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * j + 2 * (lane % 4) + i, unit = 2 * warp + lane / 16;
        *reinterpret_cast<uint32_t*>(buffer + swizzled(row, unit) + lane / 4 % 4 * 4) =
            pack(sums[4 * j + i], sums[4 * j + 2 + i]);
      }
    }
  }
}

// d = round(sum + scale * bias), BF16.
template <Major kWeights>
struct StoreTurned {
  CUtensorMap d;  // ragged; box {64, 64}
  int32_t n, num_groups;
  AnyFloats bias;  // [groups, columns]
  const float* bias_scale;

  // A warpgroup's 64 columns from first_column on, 64 rows at a time.
  template <class Buffers, int kSums>
  __device__ void take(Buffers& buffers, const WorkTile& tile, int blocks, int32_t first_column,
                       float (&sums)[kSums]) const {
    if (first_column >= n) return;
    if (bias.is_present() && tile.group != num_groups) add_bias(tile, first_column, sums);
#pragma unroll
    for (int i = 0; i < kSums / 32; ++i) {
      if (i >= blocks) return;
      char* const buffer = buffers.acquire_whole();
      write_turned<kWeights>(buffer, &sums[32 * i]);
      buffers.release([&] {
        const RaggedRow r = ragged_row(tile, tile.first_m + 64 * i);
        ptx::tma_store_4d(&d, buffer, first_column, r.row, r.end, r.wrap);
      });
    }
  }

 private:
  template <int kSums>
  __device__ void add_bias(const WorkTile& tile, int32_t first_column, float (&sums)[kSums]) const {
    const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32 % 4;
    float of_column[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t column = first_column + 16 * warp + column_of_lane<kWeights>(i);
      of_column[i] = column < n ? bias.at(tile.group, column) : 0;
    }
    const int32_t rows = tile.num_rows - tile.first_m;
    const float* const scales = bias_scale + tile.first_row + tile.first_m;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t row = lane_column(j) + i;
        const float scale = bias_scale == nullptr || row >= rows ? 1 : scales[row];
        sums[4 * j + i] = fmaf(of_column[0], scale, sums[4 * j + i]);
        sums[4 * j + 2 + i] = fmaf(of_column[1], scale, sums[4 * j + 2 + i]);
      }
    }
  }
};

}  // namespace moire::cuda::sm90
