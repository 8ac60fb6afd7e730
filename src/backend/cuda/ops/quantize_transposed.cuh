// The copy with scales down the columns that lies transposed, as FP8 tensor cores read it
// (core/scale_shapes.h): a tile lies in shared memory, and each of the block's warps has eight of
// its columns from the first row to the last, four rows a lane. So no warp waits for another's
// largest magnitudes, and what a warp stores of a column is a line.
#pragma once

#include "backend/cuda/device/transposed_tile.cuh"
#include "backend/cuda/ops/quantize_copies.cuh"

namespace moire::cuda::ops {

// Where eight columns of a row lie among the row's: they change places every four rows, so that
// lanes that read the same columns of theirs meet all banks, of 16-bit types.
__device__ inline uint32_t swapped_piece(uint32_t row, uint32_t piece) {
  return piece ^ (row / 4 % 8);
}

// A tile of some element type.
template <class T>
class SharedTile {
 public:
  // A part's rows.
  template <class Part>
  __device__ void get(const Part& part, Eight<T> (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = at(part, i);
  }
  template <class Part>
  __device__ void put(const Part& part, const Eight<T> (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) at(part, i) = rows[i];
  }

  template <class Part>
  __device__ Eight<T>& at(const Part& part, int i) {
    const auto row = static_cast<uint32_t>(part.first_row + i);
    const auto column = static_cast<uint32_t>(part.column - part.first_column);
    return eights_[row][swapped_piece(row, column / kEight)];
  }

 private:
  static constexpr uint32_t kSide = 128;
  Eight<T> eights_[kSide][kSide / kEight];
};
// The part of a tile that this thread has of its warp's columns.
template <int kScaling>
__device__ inline TilePart<kScaling> part_of_columns(const TilePart<kScaling>& tile, int columns) {
  using Shape = TileShape<kScaling>;
  static_assert(TilePart<kScaling>::kRows * kWarp == Shape::kRows &&
                Shape::kThreads / kWarp * kEight == Shape::kColumns);
  TilePart<kScaling> part = tile;
  part.column = tile.first_column + static_cast<int>(threadIdx.x / kWarp * kEight);
  part.first_row = static_cast<int>(threadIdx.x % kWarp * TilePart<kScaling>::kRows);
  part.rows_left = part.column < columns ? tile.tile_rows - part.first_row : 0;
  return part;
}

// The largest magnitude of one of eight columns, which lane i has of the i-th, in the rows that
// share a scale: the warp's or, of MXFP8 that is folded, those of eight lanes.
template <bool kSkipsNan, int kScaling, class Rows>
__device__ inline float largest_of_own_column(const Rows& rows) {
  constexpr int kLanes = kWarp / TileShape<kScaling>::kBlocks;
  auto most = largest_of_columns<kSkipsNan, 4>(rows);
  return largest_of_own<kSkipsNan, kEight, kLanes, ElementOf<Rows>>(most.words);
}

// The scale of this lane's column, which the first eight lanes store; what its elements are
// multiplied by.
template <int kScaling, class Source>
__device__ inline MultiplierOf<kScaling> own_column_scale(const QuantizeTiles<Source>& args,
                                                          const TilePart<kScaling>& part,
                                                          float amax) {
  const CopyTarget& to = args.columnwise;
  const auto store = [&](float scale) {
    const int column = part.column + static_cast<int>(threadIdx.x % kWarp);
    if (threadIdx.x % kWarp >= kEight || column >= args.source.columns) return;
    static_cast<float*>(to.scales)[part.index * to.scale_stride + column] = scale;
  };
  return own_scale<kScaling, kEight, kWarp>(args, to, amax, store);
}

// Codes of eight columns, four rows of each in a word, from `p` on in the transposed copy; those of
// rows that are not there, up to the tile's last, are 0.
template <int kScaling, class Source, class Values, class Multiplier>
__device__ inline void store_columns(const QuantizeTiles<Source>& args,
                                     const TilePart<kScaling>& part, uint8_t* p,
                                     const Values& values, Multiplier&& multiplier) {
  const CopyTarget& to = args.columnwise;
  const int left = args.source.columns - part.column;
  uint32_t words[2][4];
  with_flag(to.is_e5m2, [&](auto is_e5m2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t codes[2];
      encode_eight(codes, values[i], is_e5m2.value, multiplier);
      words[0][i] = codes[0], words[1][i] = codes[1];
    }
  });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    transpose_four(words[half]);
#pragma unroll
    for (int i = 0; i < 4; ++i, p += to.stride) {
      const int column = Source::kVectors ? 0 : 4 * half + i;
      if (column < left) *reinterpret_cast<uint32_t*>(p) = words[half][i];
    }
  }
}

// This copy of a warp's columns, from their rows; whether infinity or NaN was met.
template <int kScaling, class Source, class Values>
__device__ inline uint32_t quantize_transposed(const QuantizeTiles<Source>& args,
                                               const TilePart<kScaling>& part,
                                               const Values& values) {
  float amax = largest_of_own_column<false, kScaling>(values);
  const bool is_odd = __any_sync(kAllLanes, bit_cast<uint32_t>(amax) >= kInfinityBits) != 0;
  if (is_odd) amax = largest_of_own_column<true, kScaling>(values);
  const MultiplierOf<kScaling> own = own_column_scale(args, part, amax);
  MultiplierOf<kScaling> multipliers[kEight];
#pragma unroll
  for (int j = 0; j < kEight; ++j) multipliers[j] = of_lane<kEight>(own, j);
  const CopyTarget& to = args.columnwise;
  store_columns(args, part,
                to.data + part.column * to.stride + int64_t{part.index} * 128 + part.first_row,
                values, [&](int j) { return multipliers[j]; });
  return is_odd ? kIsOdd : 0;
}

}  // namespace moire::cuda::ops
