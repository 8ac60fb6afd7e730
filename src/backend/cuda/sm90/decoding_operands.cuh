// BF16 rows beside MXFP8 weights: which boxes fill a stage, and a lane's elements of the weights,
// decoded.
#pragma once

#include "backend/cuda/device/fp8.cuh"
#include "backend/cuda/ptx/math.cuh"
#include "backend/cuda/ptx/matrix.cuh"
#include "backend/cuda/sm90/operands.cuh"
#include "backend/cuda/sm90/staging_buffers.cuh"

namespace moire::cuda::sm90 {

// E8M0 scales of matrices whose blocks of 32 lie along the contracted dimension: the one of column
// n and block b of group g is data[g * group + n * column + b * block].
struct ColumnScales {
  const uint8_t* data;
  int64_t group;
  int32_t column, block;
  int32_t last_column, last_block;
};

// Where a lane's two columns are among the 16 of its warp, as an instruction takes them: eight
// apart, or neighbours where columns lie side by side in memory and one load brings both.
template <Major kWeights>
__device__ inline int32_t column_of_lane(int which) {
  const int32_t row = static_cast<int32_t>(threadIdx.x) % 32 / 4;
  return kWeights == Major::kK ? row + 8 * which : 2 * row + which;
}

// E8M0 as two BF16 numbers: 2^(code - 127), NaN for 255.
__device__ inline uint32_t powers_of(uint32_t code) {
  const uint32_t low = (code + 1 & 0xFE) == 0 ? 0x40 : 0;  // of 2^-127, and of NaN
  return __byte_perm(code << 7 | low, 0, 0x1010);
}

// A lane's elements of a stage: of its two columns, as wgmma takes them as its first operand. In
// shared memory codes lie in rows of 64 bytes, their 16-byte units exchanged by 64-byte swizzle: a
// row is a column's K, or, in panels of 64 columns, one of K.
template <class P, Major kWeights>
class LaneWeights {
 public:
  __device__ LaneWeights(const ColumnScales& scales, const WorkTile& tile, int consumer)
      : scales_(scales.data + tile.group * scales.group),
        block_(scales.block),
        last_block_(scales.last_block) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int32_t first = tile.first_n + 64 * consumer + 16 * warp;
    asm volatile("" : "+l"(scales_));  // computed once
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t last = scales.last_column - (kWeights == Major::kMN ? 1 - i : 0);
      columns_[i] = min(first + column_of_lane<kWeights>(i), last) * scales.column;
    }
    if constexpr (kWeights == Major::kK) {
      const int row = 64 * consumer + 16 * warp + lane / 4;
      place_ = 64 * row + 2 * (lane % 4);
      swizzle_ = (row / 2 & 3) * 16;
    } else {  // the row that the lane names to ldmatrix
      place_ = 4096 * consumer + 64 * lane + (warp ^ (lane / 2 & 3)) * 16;
    }
    if (tile.num_k > 0) load_scales(0);  // the tail has none
  }

  // Before a stage's first slice. Scales of the next stage are asked for.
  __device__ void begin(const char* codes, int k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Of a column, or of a block, each word has two.
        const uint32_t pair = next_[kWeights == Major::kK ? i : half];
        factors_[i][half] = powers_of(pair >> 8 * (kWeights == Major::kK ? half : i) & 0xFF);
      }
    }
    load_scales(k + 1);
    codes_ = codes + place_;
  }

  // 16 of K from 16 i on, i in turn.
  __device__ void decode(int i, uint32_t (&decoded)[4]) {
    const uint32_t first = factors_[0][i / 2], second = factors_[1][i / 2];
    if constexpr (kWeights == Major::kK) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // of column j % 2, from 0 or 8 on
        const char* const p = codes_ + ((16 * i) ^ swizzle_) + j % 2 * 8 * 64 + j / 2 * 8;
        const float4 v = decode_four(*reinterpret_cast<const uint16_t*>(p), false);
        decoded[j] = times_powers(pack(v.x, v.y), j % 2 == 0 ? first : second);
      }
    } else {
      if (i % 2 == 0) {
        ptx::ldmatrix_x4_transposed(ptx::shared_address(codes_) + i * 16 * 64, quads_);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {  // from 0 or 8 on: two of K, of both columns each
        const float4 v = decode_four(quads_[i % 2 * 2 + j], false);
        decoded[2 * j] = times_powers(pack(v.x, v.z), first);
        decoded[2 * j + 1] = times_powers(pack(v.y, v.w), second);
      }
    }
  }

 private:
  // Two elements times a power of two: exact, but for what is no normal number, rounded once as the
  // product in FP32 is.
  static __device__ uint32_t times_powers(uint32_t pair, uint32_t powers) {
    return bits_as<uint32_t>(
        __hmul2(bits_as<__nv_bfloat162>(pair), bits_as<__nv_bfloat162>(powers)));
  }
  __device__ void load_scales(int k) {
    if (2 * k > last_block_) return;
    if constexpr (kWeights == Major::kK) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint8_t* const scales = scales_ + static_cast<uint32_t>(columns_[i] + 2 * k);
        if (2 * k < last_block_) {
          next_[i] = ptx::load_pair_early(scales);
        } else {
          next_[i] = ptx::load_early(scales) | 127 << 8;  // codes past the last block are zeros
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t block = min(2 * k + half, last_block_) * block_;
        next_[half] = ptx::load_pair_early(scales_ + static_cast<uint32_t>(columns_[0] + block));
      }
    }
  }

  const uint8_t* scales_;
  const char* codes_;
  int32_t block_, last_block_;
  int32_t columns_[2];
  int32_t place_, swizzle_;
  uint32_t next_[2];  // pairs of scales of the next stage
  uint32_t factors_[2][2];
  uint32_t quads_[4];
};

// A group's tiles are as even as blocks of 64 rows allow: a low tile would wait for its weights.
template <class P>
class EvenWalk : RaggedMWalk<P::kTileM, P::kTileN> {
  using Walk = RaggedMWalk<P::kTileM, P::kTileN>;

 public:
  using Walk::total, Walk::Walk;

  __device__ WorkTile at(int32_t index) {
    WorkTile tile = Walk::at(index);
    tile.first_m = tile.first_m / P::kTileM * rows_of_tile(tile);
    return tile;
  }
  // Those of the tile's rows that exist.
  __device__ static int32_t rows(const WorkTile& tile) {
    return min(rows_of_tile(tile), tile.num_rows - tile.first_m);
  }

 private:
  __device__ static int32_t rows_of_tile(const WorkTile& tile) {
    const int32_t tiles = max((tile.num_rows + P::kTileM - 1) / P::kTileM, 1);
    return ((tile.num_rows + tiles - 1) / tiles + 63) / 64 * 64;
  }
};

// d = a * op(b), a BF16 [capacity, k], b of MXFP8.
template <Major kWeights>
struct DecodingRaggedM {
  CUtensorMap a;  // {k, rows}; box {64, box}
  int32_t box;    // 64, or of small groups a divisor of it
  // K-major {k, n, matrices}, box {64, tile_n, 1}; else {n, k, matrices}, {64, 64, 1}.
  CUtensorMap b;
  ColumnScales scales;
  int32_t n, k;
  int32_t zeroes_tail;

  template <class P>
  __device__ auto walk(const moire_groups& groups) const {
    return EvenWalk<P>(groups, n, (k + P::kTileK - 1) / P::kTileK, zeroes_tail != 0);
  }
  // Of 64 rows, in a tile.
  template <class P>
  __device__ int32_t blocks(const WorkTile& tile) const {
    return (EvenWalk<P>::rows(tile) + 63) / 64;
  }
  template <class P>
  __device__ int stage_bytes(const WorkTile& tile) const {
    return (EvenWalk<P>::rows(tile) + box - 1) / box * box * P::kTileKBytes + P::kBBytes;
  }
  template <class P, class Stage>
  __device__ void load(Stage& stage, uint64_t* barrier, const WorkTile& tile, int32_t k0) const {
    const int32_t rows = EvenWalk<P>::rows(tile);
    for (int32_t i = 0; i < rows; i += box) {
      ptx::tma_load_2d(stage.a + i * P::kTileKBytes, &a, barrier, k0,
                       tile.first_row + tile.first_m + i);
    }
    if constexpr (kWeights == Major::kK) {
      ptx::tma_load_3d(stage.b, &b, barrier, k0, tile.first_n, tile.matrix);
    } else {
#pragma unroll
      for (int i = 0; i < P::kTileN / 64; ++i) {
        ptx::tma_load_3d(stage.b + i * 64 * P::kTileK, &b, barrier, tile.first_n + i * 64, k0,
                         tile.matrix);
      }
    }
  }
  template <class P>
  __device__ LaneWeights<P, kWeights> weights(const WorkTile& tile, int consumer) const {
    return {scales, tile, consumer};
  }
};

}  // namespace moire::cuda::sm90
