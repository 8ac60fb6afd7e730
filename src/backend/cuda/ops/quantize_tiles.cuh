// The tiles that quantize, quantize_weight, requantize and dequantize work on: some rows, which are
// a block of a columnwise copy or of tiles, by some columns. A thread has eight neighbouring
// columns of several rows in registers, so that one read of the source serves both directions.
#pragma once

#include <moire/fields.h>
#include <moire/quantize.h>

#include <cstdint>

#include "backend/cuda/device/eight.cuh"
#include "backend/cuda/device/fp8.cuh"
#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/row_blocks.cuh"
#include "backend/cuda/device/values.cuh"
#include "core/divide.h"
#include "core/scale_shapes.h"

namespace moire::cuda::ops {

template <int kScaling>
struct TileShape {
  static constexpr int kThreads = 256;
  static constexpr int kRows = kScaling == MOIRE_SCALING_MXFP8 ? 32 : 128;
  static constexpr int kColumns = kScaling == MOIRE_SCALING_MXFP8 ? 256 : 128;
  static constexpr int kPieces = kColumns / kEight;    // of a row
  static constexpr int kRowStep = kThreads / kPieces;  // rows of a thread lie so far apart
  static constexpr int kRowsPerThread = kRows / kRowStep;
  static constexpr int kLanes = Scales<kScaling>::kBlock / kEight;  // that share a rowwise scale
};

// Where the row blocks lie. An index is the row of a block's scales in a columnwise copy, or in
// tiles.
struct ScaleBlocks {
  enum Kind : int32_t {
    kFlat,     // rows that share no scale: blocks of all rows in use, whatever the groups
    kRagged,   // from each group's first row
    kMatrices  // from each matrix' first row
  };
  moire_groups groups;  // without offsets: all rows
  int64_t matrix_rows;
  uint32_t blocks_per_matrix;
  Kind kind;

  int64_t count(int64_t size) const {
    if (kind == kFlat) return ceil_div(groups.capacity, size);
    if (kind == kMatrices) return groups.capacity / matrix_rows * blocks_per_matrix;
    return groups.capacity / size + groups.num_groups;
  }
  // A warp calls it together.
  template <int kSize>
  __device__ RowRange at(uint32_t index) const {
    if (kind == kRagged) {
      const RowBlock block = row_block_at<kSize>(groups, index);
      return {block.first, block.end};
    }
    int64_t first = int64_t{index} * kSize, end = rows_in_use(groups);
    if (kind == kMatrices) {
      const int64_t matrix = index / blocks_per_matrix;
      first = matrix * matrix_rows + int64_t{index % blocks_per_matrix} * kSize;
      end = (matrix + 1) * matrix_rows;
    }
    return {min(first, end), min(first + kSize, end)};
  }
};

// Blocks of [capacity, k] by groups, or of [G, n, k]; `shares_rows`: whether rows share scales.
inline ScaleBlocks scale_blocks(const TensorView& shape, const moire_groups& groups,
                                int32_t scaling, bool shares_rows) {
  const bool is_weight = shape.rank == 3;
  const int64_t rows = shape.num_rows();
  ScaleBlocks out{};
  out.groups = is_weight ? moire_groups{nullptr, 1, rows} : groups_or_all(groups, rows);
  out.kind = ScaleBlocks::kFlat;
  if (!shares_rows) return out;
  out.kind = is_weight ? ScaleBlocks::kMatrices : ScaleBlocks::kRagged;
  out.matrix_rows = is_weight ? shape.shape[1] : 0;
  const int64_t blocks = is_weight ? ceil_div(shape.shape[1], scale_block(scaling)) : 0;
  out.blocks_per_matrix = static_cast<uint32_t>(blocks);
  return out;
}

// A tile's place, and this thread's part of it.
template <int kScaling>
struct TilePart {
  using Shape = TileShape<kScaling>;
  uint32_t index;        // of the row block
  RowRange rows;         // empty: nothing is there
  int64_t first_column;  // of the tile
  int64_t column;        // of the thread

  __device__ TilePart(const ScaleBlocks& blocks, uint32_t column_tiles) {
    index = blockIdx.x / column_tiles;
    first_column = int64_t{blockIdx.x % column_tiles} * Shape::kColumns;
    column = first_column + threadIdx.x % Shape::kPieces * kEight;
    rows = blocks.at<Shape::kRows>(index);
  }
  // The thread's i-th row.
  __device__ int64_t row(int i) const {
    return rows.begin + i * Shape::kRowStep + threadIdx.x / Shape::kPieces;
  }
};

// Rows of floats, gathered perhaps. kVectors: rows start on 16 bytes and have a multiple of eight
// columns; else elements are read one by one.
template <class T, bool kVectors_>
struct FloatRows {
  using Element = T;
  static constexpr bool kVectors = kVectors_;
  Matrix<const T> rows;
  Indices row_idx;
  int64_t num_rows, columns;

  struct Part {};  // what eight columns of a tile have in common
  template <int kScaling>
  __device__ Part part(const TilePart<kScaling>&) const {
    return {};
  }
  // The row that is read for `row`; -1 where its index is wrong.
  __device__ int64_t named_row(int64_t row, const Reporter& reporter) const {
    if (!row_idx.is_present()) return row;
    return checked_index(row_idx, row, row_idx.at(row), num_rows, Dropping::kForbidden, reporter);
  }
  template <int kScaling>
  __device__ Eight<T> load(const TilePart<kScaling>&, const Part&, int64_t row, int64_t column,
                           const Reporter& reporter) const {
    Eight<T> out{};
    const int64_t from = column < columns ? named_row(row, reporter) : -1;
    if (from < 0) return out;
    const T* p = rows.row(from) + column;
    if constexpr (kVectors) {
      const auto* words = reinterpret_cast<const uint4*>(p);
      auto* to = reinterpret_cast<uint4*>(out.words);
#pragma unroll
      for (int i = 0; i < Eight<T>::kWords / 4; ++i) to[i] = __ldg(words + i);
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        if (column + i < columns) out.set(i, p[i]);
      }
    }
    return out;
  }
};

// Rows of FP8 with their scales, decoded. kVectors: codes start on 8 bytes.
template <bool kVectors_>
struct CodeRows {
  using Element = float;
  static constexpr bool kVectors = kVectors_;
  Matrix<const uint8_t> codes;
  const void* scales;
  int64_t scale_stride, columns;
  bool is_e5m2;
  int32_t direction;

  // Columnwise: a scale per column.
  struct Part {
    float scales[kEight];
  };
  template <int kScaling>
  __device__ Part part(const TilePart<kScaling>& tile) const {
    Part out{};
    if (direction != MOIRE_COLUMNWISE || tile.column >= columns) return out;
    using S = Scales<kScaling>;
    const auto* p =
        static_cast<const typename S::Stored*>(scales) + tile.index * scale_stride + tile.column;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (kVectors || tile.column + i < columns) out.scales[i] = S::decode(p[i]);
    }
    return out;
  }
  __device__ int64_t named_row(int64_t row, const Reporter&) const { return row; }
  template <int kScaling>
  __device__ Eight<float> load(const TilePart<kScaling>& tile, const Part& part, int64_t row,
                               int64_t column, const Reporter&) const {
    using S = Scales<kScaling>;
    Eight<float> out{};
    if (column >= columns) return out;
    const uint8_t* p = codes.row(row) + column;
    uint2 bytes{};
    if constexpr (kVectors) {
      bytes = __ldg(reinterpret_cast<const uint2*>(p));
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        const uint32_t code = column + i < columns ? p[i] : 0;
        (i < 4 ? bytes.x : bytes.y) |= code << (8 * (i % 4));
      }
    }
    float scale = 0;
    if (direction != MOIRE_COLUMNWISE) {
      const int64_t scale_row = kScaling == MOIRE_SCALING_FP8_TILE ? tile.index : row;
      scale = S::decode(static_cast<const typename S::Stored*>(
          scales)[scale_row * scale_stride + column / S::kBlock]);
    }
#pragma unroll
    for (int i = 0; i < kEight; i += 2) {
      const uint32_t word = i < 4 ? bytes.x : bytes.y;
      const float2 pair = decode_pair(word >> (8 * (i % 4)) & 0xFFFFU, is_e5m2);
      const bool is_columnwise = direction == MOIRE_COLUMNWISE;
      out.set(i, pair.x * (is_columnwise ? part.scales[i] : scale));
      out.set(i + 1, pair.y * (is_columnwise ? part.scales[i + 1] : scale));
    }
    // What lies past the last column is zero, whatever its scale.
    if constexpr (!kVectors) {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        if (column + i >= columns) out.set(i, 0.0F);
      }
    }
    return out;
  }
};

template <bool kVectors>
CodeRows<kVectors> code_rows(const moire_quantized& q, int32_t direction) {
  const TensorView data(q.data), scales(q.scales);
  return {.codes = matrix_of<const uint8_t>(data),
          .scales = scales.data,
          .scale_stride = scales.stride(),
          .columns = data.columns(),
          .is_e5m2 = data.type() == DType::kE5M2,
          .direction = direction};
}

// Rows first ... end - 1 of bytes, zeroed by the warps of all blocks.
__device__ inline void zero_bytes(uint8_t* data, int64_t stride, int64_t bytes, int64_t first,
                                  int64_t end) {
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / kWarp);
  for (int64_t row = first + int64_t{blockIdx.x} * (blockDim.x / kWarp) + threadIdx.x / kWarp;
       row < end; row += warps) {
    uint8_t* p = data + row * stride;
    // Whole words between the row's first and last few bytes.
    const int64_t head = min(bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(p) & 15U));
    const int64_t words = (bytes - head) / 16;
    for (int64_t i = threadIdx.x % kWarp; i < head; i += kWarp) p[i] = 0;
    auto* whole = reinterpret_cast<uint4*>(p + head);
    for (int64_t i = threadIdx.x % kWarp; i < words; i += kWarp) whole[i] = uint4{};
    for (int64_t i = head + 16 * words + threadIdx.x % kWarp; i < bytes; i += kWarp) p[i] = 0;
  }
}

}  // namespace moire::cuda::ops
