// The tiles that quantize, quantize_weight, requantize and dequantize work on: some rows, which are
// a block of a columnwise copy or of tiles, by some columns. A thread has eight neighbouring
// columns of several rows in registers (of requantize and dequantize four), so that one read of the
// source serves both directions. Tiles that quantise MXFP8 are small enough for a warp, which then
// waits for nobody.
#pragma once

#include <moire/fields.h>
#include <moire/quantize.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "backend/cuda/device/copy_rows.cuh"
#include "backend/cuda/device/eight.cuh"
#include "backend/cuda/device/fp8.cuh"
#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/row_blocks.cuh"
#include "backend/cuda/device/shared.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/runtime/launch.h"
#include "core/divide.h"
#include "core/scale_shapes.h"

namespace moire::cuda::ops {

// Of kRows x kColumns elements, by kTileThreads of a block's threads, each of which has so many
// columns.
template <int kBlockThreads, int kThreadsOfTile, int kRowsOfTile, int kColumnsOfTile,
          int kColumnsOfThread = kEight>
struct TileSizes {
  static constexpr int kThreads = kBlockThreads, kTileThreads = kThreadsOfTile;
  static constexpr int kTiles = kThreads / kTileThreads;  // of a block
  static constexpr int kRows = kRowsOfTile, kColumns = kColumnsOfTile;
  static constexpr int kPiece = kColumnsOfThread;
  static constexpr int kPieces = kColumns / kPiece;                      // of a row
  static constexpr int kRowsPerThread = kRows * kPieces / kTileThreads;  // neighbouring ones

  // This thread among its tile's.
  __device__ static int thread() { return static_cast<int>(threadIdx.x % kTileThreads); }
};

// Tiles of which rows and columns exchange their largest magnitudes: with scales per 128 a block's.
// Where lines have such scales it has 512 threads: 256 would have twice the rows each, and spill.
template <int kScaling>
constexpr bool kHasLongLines = kScaling == MOIRE_SCALING_FP8_BLOCK || kScaling == kFoldedMx;
constexpr int kLongThreads = 512;
template <int kScaling, int kThreads = kHasLongLines<kScaling> ? kLongThreads : 256>
struct TileShape : std::conditional_t<Scales<kScaling>::kIsMx, TileSizes<kThreads, kWarp, 32, 64>,
                                      TileSizes<kThreads, kThreads, 128, 128>> {
  static constexpr bool kIsWarps = Scales<kScaling>::kIsMx;         // a tile is a warp's
  static constexpr int kLanes = Scales<kScaling>::kBlock / kEight;  // that share a rowwise scale
  // Blocks that are folded into one, and the lanes of one of them.
  static constexpr int kBlocks = Scales<kScaling>::kIsFolded ? 4 : 1;
  static constexpr int kBlockLanes = kLanes / kBlocks;
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
      end = min((matrix + 1) * matrix_rows, groups.capacity);
    }
    return {min(first, end), min(first + kSize, end)};
  }
  // The same of a block's warps, of which most have the first one's index: that one searches for
  // them, and the others' instructions are left to what they do next.
  template <int kSize>
  __device__ RowRange at_together(uint32_t index, uint32_t first) const {
    __shared__ RowRange of_first;
    const bool searches = threadIdx.x < kWarp || index != first;
    RowRange rows{};
    if (searches) rows = at<kSize>(index);
    if (threadIdx.x == 0) of_first = rows;
    __syncthreads();
    return searches ? rows : of_first;
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

// A number of which the quotients are a product: a division takes six times the instructions.
struct Divisor {
  uint32_t value, factor, shift;

  Divisor() = default;
  explicit Divisor(uint32_t of) : value(of), shift(static_cast<uint32_t>(std::bit_width(of - 1))) {
    factor = static_cast<uint32_t>(((((uint64_t{1} << shift) - of) << 32) / of) + 1);
  }
  // Of numbers below 2^31.
  __device__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, factor) + n) >> shift; }
};

// Spans of neighbouring tiles, each a block's, which searches once for their group; where tiles are
// warps', a tile here is what all of the block's warps do at once. The last row blocks' tiles are
// single, so that all multiprocessors end at about one time.
struct TileSpans {
  Divisor tiles, spans;   // of a row
  uint32_t most, coarse;  // tiles of a span, and row blocks that are given in spans

  // A block's row block, its first tile and their end.
  __device__ uint3 at(uint32_t index) const {
    if (index < coarse * spans.value) {
      const uint32_t row_block = spans.quotient(index);
      const uint32_t first = (index - row_block * spans.value) * most;
      return {row_block, first, min(first + most, tiles.value)};
    }
    const uint32_t single = index - coarse * spans.value, row_block = tiles.quotient(single);
    const uint32_t tile = single - row_block * tiles.value;
    return {coarse + row_block, tile, tile + 1};
  }
};

// A tile's place, and this thread's part of it: some columns of neighbouring rows. A block makes
// it together.
template <int kScaling, class Sizes = TileShape<kScaling>>
struct TilePart {
  using Shape = Sizes;
  static constexpr int kRows = Shape::kRowsPerThread;
  uint32_t index;    // of the row block
  int64_t begin;     // the tile's first row
  bool is_empty;     // nothing is there
  int first_column;  // of the tile
  int column;        // of the part
  int tile_rows;
  int first_row;  // of the part, in the tile
  int rows_left;  // from that one on: of a part past the last column none
  // Two neighbouring tiles with at most half of their rows, of which either half of the threads has
  // one; this thread's stands above.
  bool is_pair = false;

  __device__ TilePart(const ScaleBlocks& blocks, uint32_t column_tiles, int columns) {
    const uint32_t first = blockIdx.x * Shape::kTiles, first_block = first / column_tiles;
    uint32_t number = first, block = first_block;
    if constexpr (Shape::kTiles > 1) {
      number += threadIdx.x / Shape::kTileThreads;
      block = number / column_tiles;
    }
    place(block, blocks.at_together<Shape::kRows>(block, first_block),
          static_cast<int>(number - block * column_tiles) * Shape::kColumns, columns);
  }
  // Of the row block `block`, which has these rows.
  __device__ TilePart(uint32_t block, const RowRange& rows, int first_column_of_tile, int columns,
                      bool is_one_of_two = false)
      : is_pair(is_one_of_two) {
    place(block, rows, first_column_of_tile, columns);
  }
  // The part's i-th row, and whether it is one of the tile's.
  __device__ int64_t row(int i) const { return begin + first_row + i; }
  __device__ bool has_row(int i) const { return i < rows_left; }
  // Whether the tile has all rows and columns of this warp, of which each thread asks alike.
  __device__ bool is_whole(int columns) const {
    constexpr int kOfWarp = kRows * kWarp / Shape::kPieces;
    return first_row / kOfWarp * kOfWarp + kOfWarp <= tile_rows &&
           first_column + Shape::kColumns <= columns;
  }
  // Its rows that are there, also for a lane past the last column, of so many neighbours of which
  // the first is not. A warp calls it together.
  template <int kLanes>
  __device__ int rows_of_lanes() const {
    return __shfl_sync(kAllLanes, rows_left, 0, kLanes);
  }

 private:
  __device__ void place(uint32_t block, const RowRange& rows, int first, int columns) {
    constexpr int kHalf = Shape::kTileThreads / 2;
    const int thread = is_pair ? Shape::thread() % kHalf : Shape::thread();
    index = block;
    first_column = is_pair ? first + Shape::thread() / kHalf * Shape::kColumns : first;
    column = first_column + thread % Shape::kPieces * Shape::kPiece;
    begin = rows.begin;
    is_empty = rows.size() == 0;
    tile_rows = static_cast<int>(rows.size());
    first_row = thread / Shape::kPieces * kRows;
    rows_left = column < columns ? tile_rows - first_row : 0;
  }
};

// Rows of floats, gathered perhaps. kVectors: rows start on 16 bytes and have a multiple of eight
// columns; else elements are read one by one.
template <class T, bool kVectors_>
struct FloatRows {
  using Element = T;
  static constexpr bool kVectors = kVectors_;
  static constexpr size_t kAskedBytes = kVectors ? 4 * kLongThreads * sizeof(Eight<T>) : 0;
  template <int kRows>
  using Rows = Eight<T>[kRows];
  Matrix<const T> rows;
  Indices row_idx;
  int64_t num_rows;
  int columns;

  // The row that is read for `row`; -1 where its index is wrong.
  __device__ int64_t named_row(int64_t row, const Reporter& reporter) const {
    if (!row_idx.is_present()) return row;
    return checked_index(row_idx, row, row_idx.at(row), num_rows, Dropping::kForbidden, reporter);
  }
  // A part's rows; zeros where there are none.
  template <int kScaling, int kRows>
  __device__ void load(const TilePart<kScaling>& tile, const Reporter& reporter,
                       Eight<T> (&values)[kRows]) const {
    for_each_row(tile, reporter,
                 [&](int i, const T* p, bool is_there) { values[i] = eight(p, tile, is_there); });
  }
  // The same to places in shared memory, which `place(i)` is of row i, asynchronously where they
  // are vectors.
  template <int kScaling, class Place>
  __device__ void fetch(const TilePart<kScaling>& tile, const Reporter& reporter,
                        Place&& place) const {
    for_each_row(tile, reporter, [&](int i, const T* p, bool is_there) {
      Eight<T>& to = place(i);
      if constexpr (kVectors) {
#pragma unroll
        for (int part = 0; part < Eight<T>::kWords / 4; ++part) {
          ptx::copy_async(&to.words[4 * part], reinterpret_cast<const uint4*>(p) + part, is_there);
        }
      } else {
        to = eight(p, tile, is_there);
      }
    });
  }
  // The same to this thread's own places, and from there.
  template <int kScaling>
  __device__ void ask(const TilePart<kScaling>& tile, const Reporter& reporter) const {
    fetch(tile, reporter, [](int i) -> Eight<T>& { return asked(i); });
  }
  template <int kScaling, int kRows>
  __device__ void take(const TilePart<kScaling>&, Eight<T> (&values)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) values[i] = asked(i);
  }

 protected:
  // Of a part that begins at p.
  template <int kScaling, int kRows>
  __device__ void load_from(const T* p, const TilePart<kScaling>& tile,
                            Eight<T> (&values)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i, p += rows.stride) {
      values[i] = eight(p, tile, tile.has_row(i));
    }
  }

 private:
  __device__ static Eight<T>& asked(int i) {
    return dynamic_shared<Eight<T>>()[i * kLongThreads + threadIdx.x];
  }
  // Calls take(i, p, is_there) for each of a part's rows, which begins at p if it is there.
  template <int kScaling, class Take>
  __device__ void for_each_row(const TilePart<kScaling>& tile, const Reporter& reporter,
                               Take&& take) const {
    constexpr int kRows = TilePart<kScaling>::kRows;
    if (row_idx.is_present()) return for_each_gathered_row(tile, reporter, take);
    const T* p = rows.row(tile.row(0)) + tile.column;
#pragma unroll
    for (int i = 0; i < kRows; ++i, p += rows.stride) take(i, p, tile.has_row(i));
  }
  template <int kScaling, class Take>
  __device__ void for_each_gathered_row(const TilePart<kScaling>& tile, const Reporter& reporter,
                                        Take&& take) const {
    constexpr int kRows = TilePart<kScaling>::kRows;
    int64_t from[kRows];
    bool is_right = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) from[i] = tile.has_row(i) ? row_idx.at(tile.row(i)) : 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool is_row = from[i] >= 0 && from[i] < num_rows;
      is_right = is_right && is_row;
      take(i, rows.row(from[i]) + tile.column, tile.has_row(i) && is_row);
    }
    if (is_right) return;
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) {
      if (tile.has_row(i)) named_row(tile.row(i), reporter);
    }
  }
  template <int kScaling>
  __device__ Eight<T> eight(const T* p, const TilePart<kScaling>& tile, bool is_there) const {
    Eight<T> out{};
    if (!is_there) return out;
    if constexpr (kVectors) {
      const auto* words = reinterpret_cast<const uint4*>(p);
      auto* to = reinterpret_cast<uint4*>(out.words);
#pragma unroll
      for (int i = 0; i < Eight<T>::kWords / 4; ++i) to[i] = __ldg(words + i);
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        if (tile.column + i < columns) out.set(i, p[i]);
      }
    }
    return out;
  }
};

// Calls f.operator()<T, kVectors>().
template <class F>
void with_floats(DType dtype, bool takes_vectors, F&& f) {
  with_float_type(dtype, [&]<class T>() {
    takes_vectors ? f.template operator()<T, true>() : f.template operator()<T, false>();
  });
}

// Rows of calls whose scales are powers of two, as most are: a kernel that knows it has fewer
// instructions.
struct PlainRows : FloatRows<__nv_bfloat16, true> {};

// Whether a source's columns are summed, too.
template <class Source>
constexpr bool kIsSummed = requires(Source source) {
  source.bias_parts;
};

// Rows of matrices that lie anywhere, in blocks of each (ScaleBlocks::kMatrices).
template <class T, bool kVectors>
struct ListedRows : FloatRows<T, kVectors> {
  static constexpr size_t kAskedBytes = 0;
  static constexpr int64_t kMost = 1024;  // a kernel's parameters have 32 KB
  const T* matrices[kMost];
  int64_t matrix_rows, first_row;  // first_row: of these among those of the whole list
  uint32_t blocks_per_matrix;

  static int64_t launches(int64_t count) { return ceil_div(count, kMost); }
  // The matrices of a weight, packed or listed, from `first` on; returns what they are together.
  TensorView take(const Weight& weight, int64_t first) {
    TensorView some(weight.tensor);
    some.shape[0] = std::min(some.shape[0] - first, kMost);
    matrix_rows = some.shape[1];
    first_row = first * matrix_rows;
    const auto* const packed = static_cast<const T*>(some.data) + first_row * some.stride();
    for (int64_t g = 0; g < some.shape[0]; ++g) {
      matrices[g] = weight.list != nullptr ? static_cast<const T*>(weight.list[first + g])
                                           : packed + g * matrix_rows * some.stride();
    }
    return some;
  }

  template <int kScaling, int kRows>
  __device__ void load(const TilePart<kScaling>& tile, const Reporter&,
                       Eight<T> (&values)[kRows]) const {
    const uint32_t matrix = tile.index / blocks_per_matrix;
    const int64_t row = tile.row(0) - matrix * matrix_rows;
    this->load_from(matrices[matrix] + row * this->rows.stride + tile.column, tile, values);
  }
};

// One launch of a kernel over all tiles of such sizes, one block at least: it zeroes the tail where
// there is nothing else.
template <class Tile, class Args, class... More>
void launch_tiles(Launcher& launcher, void (*kernel)(Args, Reporter, More...), Args args,
                  const More&... more) {
  const int64_t column_tiles = ceil_div(args.source.columns, Tile::kColumns);
  args.column_tiles = static_cast<uint32_t>(column_tiles);
  const int64_t row_blocks = std::max<int64_t>(1, args.blocks.count(Tile::kRows));
  launcher.launch(kernel, {blocks_for(row_blocks * column_tiles, Tile::kTiles), Tile::kThreads},
                  args, launcher.reporter(), more...);
}

// Tiles of a span at most; blocks of threads that a multiprocessor holds, and the dynamic shared
// memory of each.
struct SpanSizes {
  int64_t most;
  int blocks;
  size_t shared_bytes = 0;
};
// The same of spans: a tile for every 2^25 elements, and in the end two single ones for each block
// that all multiprocessors hold.
template <class Tile, class Args, class... More>
void launch_spans(Launcher& launcher, void (*kernel)(Args, Reporter, More...), Args args,
                  const SpanSizes& sizes, const More&... more) {
  constexpr int64_t kColumns = Tile::kColumns * Tile::kTiles, kElements = kColumns * Tile::kRows;
  const int64_t row_blocks = std::max<int64_t>(1, args.blocks.count(Tile::kRows));
  const int64_t tiles = std::max<int64_t>(1, ceil_div(args.source.columns, kColumns));
  const int64_t in_span = std::clamp<int64_t>(row_blocks * tiles * kElements >> 25, 1, sizes.most);
  const int64_t all = int64_t{launcher.state().num_multiprocessors} * sizes.blocks;
  const int64_t fine = std::min(row_blocks, ceil_div(2 * all, tiles));
  const int64_t spans = ceil_div(tiles, in_span), coarse = row_blocks - fine;
  args.spans = {Divisor(static_cast<uint32_t>(tiles)), Divisor(static_cast<uint32_t>(spans)),
                static_cast<uint32_t>(in_span), static_cast<uint32_t>(coarse)};
  launcher.launch(
      kernel, {blocks_for(coarse * spans + fine * tiles, 1), Tile::kThreads, sizes.shared_bytes},
      args, launcher.reporter(), more...);
}

// Whether eight columns of every matrix are read by vectors.
inline bool opens_eights(const Weight& weight) {
  const TensorView source(weight.tensor);
  bool opens = source.columns() % kEight == 0 && opens_vectors({source});
  for_each_matrix(weight, [&](int64_t, const void* data, int64_t) {
    opens = opens && reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
  });
  return opens;
}
// Whether eight columns of a copy are one load or store: codes, and columnwise E8M0 scales, in rows
// that start on 8 bytes, values on 16. Absent ones are.
inline bool opens_eights(const moire_quantized& copy, int32_t direction) {
  const auto opens = [](const TensorView& t) {
    const bool fits = t.num_rows() <= 1 || t.stride() % kEight == 0;
    return reinterpret_cast<uintptr_t>(t.data) % kEight == 0 && fits;
  };
  const TensorView data(copy.data), scales(copy.scales);
  if (!data.is_present()) return true;
  if (data.columns() % kEight != 0) return false;
  if (is_values(copy)) return opens_vectors({data});
  const bool are_bytes = scales.type() == DType::kE8M0 && direction == MOIRE_COLUMNWISE;
  return opens(data) && (!are_bytes || opens(scales));
}

// Rows first ... end - 1 of bytes, zeroed by the warps of all blocks.
__device__ __noinline__ inline void zero_bytes(uint8_t* data, int64_t stride, int64_t bytes,
                                               int64_t first, int64_t end) {
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / kWarp);
  for (int64_t row = first + int64_t{blockIdx.x} * (blockDim.x / kWarp) + threadIdx.x / kWarp;
       row < end; row += warps) {
    zero_run(data + row * stride, bytes, threadIdx.x % kWarp, kWarp);
  }
}

}  // namespace moire::cuda::ops
