// FP8 operands with FP32 scales: which boxes fill a stage, and where a step's scales are.
#pragma once

#include "backend/cuda/ptx/math.cuh"
#include "backend/cuda/sm90/epilogue_values.cuh"
#include "backend/cuda/sm90/operands.cuh"
#include "backend/cuda/sm90/scaled_main_loop.cuh"

namespace moire::cuda::sm90 {

// FP32 scales of tiles of 128 x 128: [groups, n / 128, k / 128] with these strides.
struct TileScales {
  const float* data;
  int64_t group_stride, stride;
  int32_t last_n;  // the last one along n
};

// A warp's scales of a step: of its rows of a, and of the tile's columns, kSpan at a time. Each
// lane reads one of either: of the rows that its quad shares, that of its place in the quad; of the
// columns the span of its number.
template <class P>
class RowAndTileScales {
 public:
  __device__ RowAndTileScales(const float* a, int64_t a_stride, const TileScales& b,
                              const WorkTile& tile, int32_t first_m) {
    const int lane = threadIdx.x % 32;
    const int32_t row = first_m + lane / 4 + lane % 2 * 8 + lane / 2 % P::kRowBlocks * 64;
    const int32_t tile_n = (tile.first_n + min(lane, kSpans - 1) * kSpan) / 128;
    rows_ = a + (tile.first_row + min(row, tile.num_rows - 1)) * a_stride;
    columns_ = b.data + tile.group * b.group_stride + min(tile_n, b.last_n) * b.stride;
  }

  // Asks for those of the next step.
  __device__ void load() {
    values_[0] = ptx::load_early(rows_);
    values_[1] = ptx::load_early(columns_);
    ++rows_;
    ++columns_;
  }
  // While the products of a row block are under way: the products of its scales.
  __device__ void prepare(int block, const Stage<P>&) {
    bool all = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int span = 0; span < kSpans; ++span) {
        both_[half][span] = row(block, half) * column(span);
        all &= is_normal(both_[half][span]);
      }
      ptx::keep_behind(both_[half]);
    }
    is_plain_ = __all_sync(~0u, all);
  }
  // sums += products * scales.
  __device__ void add(int block, const Stage<P>&, float (&products)[P::kTileN / 2],
                      float (&sums)[P::kTileN / 2]) {
    if (!is_plain_) {
#pragma unroll
      for (int span = 0; span < kSpans; ++span) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const ScaleFactors f(row(block, half), column(span));
          both_[half][span] = f.second;
#pragma unroll
          for (int j = 0; j < kSpan / 4; ++j) {
            products[span * kSpan / 2 + j / 2 * 4 + half * 2 + j % 2] *= f.first;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < P::kTileN / 2; ++i) {
      sums[i] = fmaf(products[i], both_[i / 2 % 2][2 * i / kSpan], sums[i]);
    }
  }

 private:
  static constexpr int kSpan = P::kTileN % 128 == 0 ? 128 : 64, kSpans = P::kTileN / kSpan;
  __device__ float row(int block, int half) const {
    return __shfl_sync(~0u, values_[0], 2 * block + half, 4);
  }
  __device__ float column(int span) const { return __shfl_sync(~0u, values_[1], span); }

  const float *rows_, *columns_;
  float values_[2];  // this lane's: of rows, of columns
  float both_[2][kSpans];
  bool is_plain_;
};

// d = a * b^T, K-major codes: a scale for 128 of a row of a, and for a tile of b.
template <bool kIsE5M2>
struct ScaledRaggedM : RaggedM<Major::kK> {
  static constexpr bool kIsScaled = true, kIsE5M2A = kIsE5M2, kIsE5M2B = false;

  const float* a_scales;
  int64_t a_scales_stride;
  TileScales b_scales;

  template <class P>
  __device__ RowAndTileScales<P> scales(const WorkTile& tile, int32_t first_m) const {
    return {a_scales, a_scales_stride, b_scales, tile, first_m};
  }
};

// The same where every column of the tile has a scale of its own, which came with the stage.
template <class P>
class RowAndColumnScales {
 public:
  __device__ RowAndColumnScales(const float* a, int64_t a_stride, int64_t first_block, int32_t m,
                                int32_t first_m)
      : stride_(a_stride) {
    const int lane = threadIdx.x % 32;
    const int32_t row = first_m + lane / 4 + lane % 2 * 8 + lane / 2 % P::kRowBlocks * 64;
    rows_ = a + first_block * a_stride + min(row, m - 1);
  }

  __device__ void load() {
    value_ = ptx::load_early(rows_);
    rows_ += stride_;
  }
  __device__ void prepare(int, const Stage<P>& stage) { is_plain_ = are_moderate(stage); }
  __device__ void add(int block, const Stage<P>& stage, float (&products)[P::kTileN / 2],
                      float (&sums)[P::kTileN / 2]) {
    const float rows[2] = {row(block, 0), row(block, 1)};
    if (!is_plain_) {
#pragma unroll
      for (int i = 0; i < P::kTileN / 2; ++i) {
        const float2 c = columns(stage, i / 4);
        const ScaleFactors f(rows[i / 2 % 2], i % 2 == 0 ? c.x : c.y);
        sums[i] = fmaf(products[i] * f.first, f.second, sums[i]);
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < P::kTileN / 8; ++j) {
      const float2 c = columns(stage, j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * j + 2 * half;
        sums[i] = fmaf(products[i], rows[half] * c.x, sums[i]);
        sums[i + 1] = fmaf(products[i + 1], rows[half] * c.y, sums[i + 1]);
      }
    }
  }

 private:
  // 0, which columns past the last have, or 2^-62 to 2^62: products of two are normal, or 0.
  static __device__ bool is_moderate(float x) {
    return x == 0 || 2 * __float_as_uint(x) - (65u << 24) < 125u << 24;
  }
  __device__ bool are_moderate(const Stage<P>& stage) const {
    bool all = is_moderate(value_);
#pragma unroll
    for (int i = 0; i < P::kTileN / 32; ++i) {
      all &= is_moderate(stage.scales[threadIdx.x % 32 + 32 * i]);
    }
    return __all_sync(~0u, all);
  }

  __device__ float row(int block, int half) const {
    return __shfl_sync(~0u, value_, 2 * block + half, 4);
  }
  // Of this lane's columns in column group j.
  static __device__ float2 columns(const Stage<P>& stage, int j) {
    return *reinterpret_cast<const float2*>(stage.scales + lane_column(j));
  }

  const float* rows_;
  int64_t stride_;
  float value_;  // this lane's, of rows
  bool is_plain_;
};

// d_g = a_g^T * b_g over the rows of a group, whose codes were turned over
// (ops/core_codes.h): a scale for 128 rows of each column of a and of b.
template <bool kA5, bool kB5>
struct ScaledRaggedK {
  static constexpr bool kIsScaled = true, kIsE5M2A = kA5, kIsE5M2B = kB5;

  CUtensorMap a, b;      // {blocks of 128 rows, m or n}; box {128, tile_m or tile_n}
  CUtensorMap b_scales;  // {n, blocks}; box {tile_n, 1}
  const float* a_scales;
  int64_t a_scales_stride;
  int32_t m, n;

  static __device__ int32_t first_block(const WorkTile& tile) {
    return tile.first_row / 128 + tile.group;
  }
  template <class P>
  __device__ auto walk(const moire_groups& groups) const {
    return RaggedKWalk<P::kTileM, P::kTileN, P::kTileK>(groups, m, n);
  }
  __device__ int32_t rows_of_output(const WorkTile&) const { return m; }

  template <class P, class Stage>
  __device__ void load(Stage& stage, uint64_t* barrier, const WorkTile& tile, int32_t k0) const {
    const int32_t block = first_block(tile) + k0 / 128;
    ptx::tma_load_2d(stage.a, &a, barrier, 128 * block, tile.first_m);
    ptx::tma_load_2d(stage.b, &b, barrier, 128 * block, tile.first_n);
    ptx::tma_load_2d(stage.scales, &b_scales, barrier, tile.first_n, block);
  }
  template <class P>
  __device__ RowAndColumnScales<P> scales(const WorkTile& tile, int32_t first_m) const {
    return {a_scales, a_scales_stride, first_block(tile), m, first_m};
  }
};

}  // namespace moire::cuda::sm90
