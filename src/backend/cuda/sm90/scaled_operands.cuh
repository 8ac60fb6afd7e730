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

// A lane's scales of a step: of its two rows, which come with the stage, and of the one or two
// tiles that the columns lie in.
template <class P>
class RowAndTileScales {
  static_assert(P::kTileN == 192);  // that is 128 columns of one tile and 64 of a neighbour

 public:
  static constexpr bool kAreReadLate = false;  // from a stage, with its products

  __device__ RowAndTileScales(const TileScales& b, const WorkTile& tile, int32_t first_m)
      : tiles_(b.data),
        row_(first_row_of_lane(tile, first_m) + (tile.first_row + tile.first_m) % 4),
        middle_is_second_(tile.first_n % 128 != 0) {
    const int32_t tile_n = tile.first_n / 128;
    tile_ = tile.group * b.group_stride + tile_n * b.stride;
    to_second_ = tile_n < b.last_n ? b.stride : 0;
  }

  __device__ void begin() { load_columns(0); }
  // While a step's products are under way: the products of its scales; and asks for the next.
  __device__ void prepare(const StageScales<P::kScales>& scales, int stage, bool has_next) {
    const float middle = middle_is_second_ ? second_ : first_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_[half] = scales.values[row_ + 8 * half];
      both_[half][0] = rows_[half] * first_;
      both_[half][1] = rows_[half] * middle;
      both_[half][2] = rows_[half] * second_;
      ptx::keep_behind(both_[half]);
    }
    are_moderate_ = all_moderate({rows_[0], rows_[1], first_, second_});
    if (has_next) load_columns(stage + 1);
  }
  __device__ void next_round() { tile_ += P::kNumStages; }
  // sums += products * scales.
  __device__ void add(const StageScales<P::kScales>&, int stage, float (&products)[P::kTileN / 2],
                      float (&sums)[P::kTileN / 2]) {
    if (!are_moderate_) [[unlikely]]
      take_apart(stage, products);
#pragma unroll
    for (int i = 0; i < P::kTileN / 2; ++i) {
      sums[i] = fmaf(products[i], both_[i / 2 % 2][i / 32], sums[i]);
    }
  }

 private:
  // The first factor goes to the products, the second stays.
  __device__ void take_apart(int stage, float (&products)[P::kTileN / 2]) {
    const float first = tiles_[tile_ + stage], second = tiles_[tile_ + to_second_ + stage];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int span = 0; span < 3; ++span) {
        const bool is_first = span == 0 || (span == 1 && !middle_is_second_);
        const ScaleFactors f(rows_[half], is_first ? first : second);
        both_[half][span] = f.second;
#pragma unroll
        for (int i = 32 * span; i < 32 * span + 32; ++i) {
          if (i / 2 % 2 == half) products[i] *= f.first;
        }
      }
    }
  }
  __device__ void load_columns(int step) {
    first_ = ptx::load_early(tiles_ + tile_ + step);
    second_ = ptx::load_early(tiles_ + tile_ + to_second_ + step);
  }

  const float* tiles_;
  int32_t row_, tile_, to_second_;
  bool middle_is_second_, are_moderate_;
  float first_, second_;        // of the step to come
  float rows_[2], both_[2][3];  // of this one
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
};

// The same where every column of the tile has a scale of its own, which came with the stage, too.
template <class P>
class RowAndColumnScales {
 public:
  static constexpr bool kAreReadLate = true;

  __device__ RowAndColumnScales(const WorkTile& tile, int32_t first_m)
      : row_(first_row_of_lane(tile, first_m)) {}

  __device__ void begin() {}
  __device__ void prepare(const StageScales<P::kScales>& scales, int, bool) {
    rows_[0] = scales.values[row_];
    rows_[1] = scales.values[row_ + 8];
    ptx::keep_behind(rows_);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kColumns = P::kTileN / 32;
    float of_lane[kColumns + 2] = {rows_[0], rows_[1]};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) of_lane[2 + i] = scales.values[P::kTileM + 32 * i + lane];
    are_moderate_ = all_moderate(of_lane);
  }
  __device__ void next_round() {}
  __device__ void add(const StageScales<P::kScales>& scales, int,
                      const float (&products)[P::kTileN / 2], float (&sums)[P::kTileN / 2]) const {
    if (are_moderate_) [[likely]] {
      each_product(scales, [&](int i, float row, float column) {
        sums[i] = fmaf(products[i], row * column, sums[i]);
      });
    } else {
      each_product(scales, [&](int i, float row, float column) {
        const ScaleFactors f(row, column);
        sums[i] = fmaf(products[i] * f.first, f.second, sums[i]);
      });
    }
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
  bool are_moderate_;
  float rows_[2];
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
};

}  // namespace moire::cuda::sm90
