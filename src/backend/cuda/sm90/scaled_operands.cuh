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
  int32_t group_stride, stride;
  int32_t last_n;  // the last one along n
};

// Which of its own two rows of a tile a lane has the sums of: this one and the eighth behind it.
__device__ inline int32_t first_row_of_lane(const WorkTile& tile, int32_t first_m) {
  return first_m - tile.first_m + static_cast<int32_t>(threadIdx.x) % 32 / 4;
}

// Scales of the one or two tiles that the columns of a tile lie in, for 32 steps in K at once: a
// lane has those of one step.
class TileScalesOfLanes {
 public:
  __device__ TileScalesOfLanes(const TileScales& b, const WorkTile& tile) : num_k_(tile.num_k) {
    const int32_t tile_n = tile.first_n / 128;
    first_ = b.data + tile.group * b.group_stride + tile_n * b.stride;
    to_second_ = tile_n < b.last_n ? b.stride : 0;
  }
  // From `step` on; 0 past the last one.
  __device__ float2 load(int32_t step) const {
    step += static_cast<int32_t>(threadIdx.x) % 32;
    if (step >= num_k_) return {};
    return {ptx::load_early(first_ + step), ptx::load_early(first_ + to_second_ + step)};
  }

 private:
  const float* first_;
  int32_t to_second_, num_k_;
};

// Where the scale of the tile's first row is in a stage: a box begins at a multiple of four rows.
__device__ inline int32_t first_row_in_box(const WorkTile& tile) {
  return (tile.first_row + tile.first_m) % 4;
}

// A lane's scales: of its two rows, which come with the stage, and of the columns' tiles, which are
// asked of the lane that has them a step ahead.
template <class P>
class RowAndTileScales {
  static_assert(P::kTileN == 192);  // that is 128 columns of one tile and 64 of a neighbour
  static_assert(32 % P::kNumStages == 0);

 public:
  static constexpr bool kAreReadLate = false;  // from a stage, with its products

  __device__ RowAndTileScales(const TileScales& b, const WorkTile& tile, int32_t first_m)
      : tiles_(b, tile),
        row_(first_row_of_lane(tile, first_m) + first_row_in_box(tile)),
        middle_is_second_(tile.first_n % 128 != 0),
        of_lanes_(tiles_.load(0)),
        later_(tiles_.load(32)) {}

  // While the products of step k are under way.
  __device__ void prepare(const StageScales<P::kScales>& scales, int stage, int k) {
    if (stage == 0 && k == 0) ask(0);
    columns_[0] = next_[0];
    columns_[1] = middle_is_second_ ? next_[1] : next_[0];
    columns_[2] = next_[1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_[half] = scales.values[row_ + 8 * half];
#pragma unroll
      for (int span = 0; span < 3; ++span) both_[half][span] = rows_[half] * columns_[span];
      ptx::keep_behind(both_[half]);
    }
    if (stage + 1 == P::kNumStages && (k + 1) % 32 == 0) {
      of_lanes_ = later_;
      later_ = tiles_.load(k + 33);
    }
    ask(k + 1);
  }
  // sums += products * scales, of that step; in a tile's first one there are no sums before.
  template <bool kIsFirst>
  __device__ void add(const StageScales<P::kScales>&, const float (&products)[P::kTileN / 2],
                      float (&sums)[P::kTileN / 2]) const {
#pragma unroll
    for (int i = 0; i < P::kTileN / 2; ++i) {
      sums[i] = fmaf(products[i], both_[i / 2 % 2][i / 32], kIsFirst ? 0.0f : sums[i]);
    }
  }
  __device__ void add_with_care(const StageScales<P::kScales>&,
                                const float (&products)[P::kTileN / 2],
                                float (&sums)[P::kTileN / 2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int span = 0; span < 3; ++span) {
        const ScaleFactors f(rows_[half], columns_[span]);
#pragma unroll
        for (int i = 32 * span; i < 32 * span + 32; ++i) {
          if (i / 2 % 2 == half) sums[i] = fmaf(products[i] * f.first, f.second, sums[i]);
        }
      }
    }
  }

 private:
  __device__ void ask(int32_t step) {
    next_[0] = __shfl_sync(~0u, of_lanes_.x, step % 32);
    next_[1] = __shfl_sync(~0u, of_lanes_.y, step % 32);
  }

  TileScalesOfLanes tiles_;
  int32_t row_;
  bool middle_is_second_;
  float2 of_lanes_, later_;
  float next_[2];                            // of the step to come
  float rows_[2], columns_[3], both_[2][3];  // of this one
};

// What the examiner sees of them. Rows past the group's end, whose sums nobody stores, are left
// out: their scales may be anything.
template <class P>
class ExaminedRowAndTileScales {
 public:
  __device__ ExaminedRowAndTileScales(const TileScales& b, const WorkTile& tile)
      : tiles_(b, tile),
        begin_(first_row_in_box(tile)),
        end_(begin_ + min(tile.num_rows - tile.first_m, P::kTileM)) {}

  __device__ void take(const StageScales<P::kScales>& scales, int k) {
    if (k % 32 == 0) {
      take_tiles();
      of_lanes_ = tiles_.load(k);
    }
    for (int i = begin_ + static_cast<int>(threadIdx.x) % 32; i < end_; i += 32) {
      range_.take(scales.values[i]);
    }
  }
  __device__ const ScaleRange& all() {
    take_tiles();
    return range_;
  }

 private:
  __device__ void take_tiles() {
    range_.take(of_lanes_.x);
    range_.take(of_lanes_.y);
  }

  TileScalesOfLanes tiles_;
  int32_t begin_, end_;
  float2 of_lanes_ = {};
  ScaleRange range_;
};

// d = a * b^T, K-major codes: a scale for 128 of a row of a, and for a tile of b.
template <bool kIsE5M2>
struct ScaledRaggedM : RaggedM<Major::kK> {
  static constexpr bool kIsE5M2A = kIsE5M2, kIsE5M2B = false;

  CUtensorMap a_scales;  // turned over, {rows, k / 128}; box {tile_m + 4, 1}
  TileScales b_scales;

  template <class P>
  __device__ void load_scales(StageScales<P::kScales>& scales, uint64_t* barrier,
                              const WorkTile& tile, int32_t k) const {
    ptx::tma_load_2d(scales.values, &a_scales, barrier, (tile.first_row + tile.first_m) & ~3, k);
  }
  template <class P>
  __device__ RowAndTileScales<P> scales(const WorkTile& tile, int32_t first_m) const {
    return {b_scales, tile, first_m};
  }
  template <class P>
  __device__ ExaminedRowAndTileScales<P> examined_scales(const WorkTile& tile) const {
    return {b_scales, tile};
  }
};

// The same where every column of the tile has a scale of its own, which came with the stage, too.
template <class P>
class RowAndColumnScales {
 public:
  static constexpr bool kAreReadLate = true;

  __device__ RowAndColumnScales(const WorkTile& tile, int32_t first_m)
      : row_(first_row_of_lane(tile, first_m)) {}

  __device__ void prepare(const StageScales<P::kScales>& scales, int, int) {
    rows_[0] = scales.values[row_];
    rows_[1] = scales.values[row_ + 8];
    ptx::keep_behind(rows_);
  }
  template <bool kIsFirst>
  __device__ void add(const StageScales<P::kScales>& scales, const float (&products)[P::kTileN / 2],
                      float (&sums)[P::kTileN / 2]) const {
    each_product(scales, [&](int i, float row, float column) {
      sums[i] = fmaf(products[i], row * column, kIsFirst ? 0.0f : sums[i]);
    });
  }
  __device__ void add_with_care(const StageScales<P::kScales>& scales,
                                const float (&products)[P::kTileN / 2],
                                float (&sums)[P::kTileN / 2]) const {
    each_product(scales, [&](int i, float row, float column) {
      const ScaleFactors f(row, column);
      sums[i] = fmaf(products[i] * f.first, f.second, sums[i]);
    });
  }

 private:
  template <class Add>
  __device__ void each_product(const StageScales<P::kScales>& scales, Add add) const {
#pragma unroll
    for (int j = 0; j < P::kTileN / 8; ++j) {
      const float2 c = *reinterpret_cast<const float2*>(scales.values + P::kTileM + lane_column(j));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * j + 2 * half;
        add(i, rows_[half], c.x);
        add(i + 1, rows_[half], c.y);
      }
    }
  }

  int32_t row_;
  float rows_[2];
};

template <class P>
class ExaminedRowAndColumnScales {
  static_assert(P::kScales % 32 == 0);

 public:
  __device__ void take(const StageScales<P::kScales>& scales, int) {
#pragma unroll
    for (int i = 0; i < P::kScales; i += 32) {
      range_.take(scales.values[i + static_cast<int>(threadIdx.x) % 32]);
    }
  }
  __device__ const ScaleRange& all() const { return range_; }

 private:
  ScaleRange range_;
};

// d_g = a_g^T * b_g over the rows of a group, whose codes were turned over
// (ops/core_codes.h): a scale for 128 rows of each column of a and of b.
template <bool kA5, bool kB5>
struct ScaledRaggedK {
  static constexpr bool kIsE5M2A = kA5, kIsE5M2B = kB5;

  CUtensorMap a, b;                // {blocks of 128 rows, m or n}; box {128, tile_m or tile_n}
  CUtensorMap a_scales, b_scales;  // {m or n, blocks}; box {tile_m or tile_n, 1}
  int32_t m, n;

  static __device__ int32_t first_block(const WorkTile& tile) {
    return tile.first_row / 128 + tile.group;
  }
  template <class P>
  __device__ auto walk(const moire_groups& groups) const {
    return RaggedKWalk<P::kTileM, P::kTileN, P::kTileK>(groups, m, n);
  }
  __device__ int32_t rows_of_output(const WorkTile&) const { return m; }
  template <class P>
  __device__ int stage_bytes(const WorkTile&) const {
    return P::kStageBytes;
  }

  template <class P, class Stage>
  __device__ void load(Stage& stage, uint64_t* barrier, const WorkTile& tile, int32_t k0) const {
    const int32_t row = 128 * first_block(tile) + k0;
    ptx::tma_load_2d(stage.a, &a, barrier, row, tile.first_m);
    ptx::tma_load_2d(stage.b, &b, barrier, row, tile.first_n);
  }
  template <class P>
  __device__ void load_scales(StageScales<P::kScales>& scales, uint64_t* barrier,
                              const WorkTile& tile, int32_t k) const {
    const int32_t block = first_block(tile) + k;
    ptx::tma_load_2d(scales.values, &a_scales, barrier, tile.first_m, block);
    ptx::tma_load_2d(scales.values + P::kTileM, &b_scales, barrier, tile.first_n, block);
  }
  template <class P>
  __device__ RowAndColumnScales<P> scales(const WorkTile& tile, int32_t first_m) const {
    return {tile, first_m};
  }
  template <class P>
  __device__ ExaminedRowAndColumnScales<P> examined_scales(const WorkTile&) const {
    return {};
  }
};

}  // namespace moire::cuda::sm90
