// Where the activation's backward leaves what glu_backward would store, to be quantised: tiles of
// 128 columns in shared memory, each as quantize has it. With scales per 128 they have 128 rows; of
// MXFP8, which a warp quantises by itself, 32.
#pragma once

#include <type_traits>

#include "backend/cuda/ops/glu_gating.cuh"
#include "backend/cuda/ops/quantize_kernel.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"

namespace moire::cuda::ops {

constexpr uint32_t kGluColumns = 128;

template <int kScaling>
struct GluTile {
  static constexpr bool kIsMx = kScaling == MOIRE_SCALING_MXFP8;
  static constexpr uint32_t kRows = TileShape<kScaling>::kRows;
  static constexpr uint32_t kThreads = 4 * kRows;
  static constexpr uint32_t kBlocks = kIsMx ? 6 : 2;         // of a multiprocessor
  static constexpr uint32_t kPieces = kGluColumns / kEight;  // of a row
  static constexpr int kPeriod = 32;                         // rows whose pieces lie differently
  static constexpr uint32_t kBytes = kRows * kGluColumns * sizeof(__nv_bfloat16);

  // Where eight columns of a row lie, in bytes, of tile `which` or, of tile 0, that behind it. A
  // row's pieces of eight change places so that eight threads meet all banks, whether they lie side
  // by side, are two rows' (as GradientPart writes), or the same one of every fourth row. Each bit
  // of a place is an exclusive or of bits of the row and column.
  __device__ static uint32_t offset(uint32_t which, uint32_t row, uint32_t column) {
    const uint32_t tile = which + column / kGluColumns, piece = column % kGluColumns / kEight;
    const uint32_t place = piece ^ ((piece / 8 + tile) % 2 * 3) ^ (row % 2 * 4);
    return tile * kBytes + (row * kPieces + swapped_piece(row, place)) * sizeof(uint4);
  }
  __device__ static uint4& at(uint32_t offset) {
    return *reinterpret_cast<uint4*>(dynamic_shared<char>() + offset);
  }
  __device__ static uint4& piece(uint32_t which, uint32_t row, uint32_t piece) {
    return at(offset(which, row, piece * kEight));
  }
};
static_assert(TileShape<MOIRE_SCALING_FP8_BLOCK>::kThreads == 4 * kGluColumns &&
              TileShape<MOIRE_SCALING_FP8_BLOCK>::kColumns == kGluColumns);

// A part of MXFP8, of eight rows: read anew at each use, for registers do not hold them. They
// become values and never codes.
struct SharedEights {
  static constexpr bool kBecomeValues = true;
  uint32_t which, first_row, piece;

  __device__ Eight<__nv_bfloat16> operator[](int i) const {
    return eight_at(
        ptx::shared_address(&GluTile<MOIRE_SCALING_MXFP8>::piece(which, first_row + i, piece)));
  }
};

// Rows of one of those tiles: of grad_z by its first column, or of act.
template <int kOfScaling>
struct TileRows {
  using Element = __nv_bfloat16;
  using Tile = GluTile<kOfScaling>;
  using Part = TilePart<kOfScaling>;
  static constexpr bool kVectors = true;
  template <int kRows>
  using Rows = std::conditional_t<Tile::kIsMx, SharedEights, Eight<Element>[kRows]>;
  int columns;
  Divisor between;      // of grad_z: tiles of a pair begin so many columns apart
  uint32_t first_tile;  // in shared memory

  __device__ int64_t named_row(int64_t row, const Reporter&) const { return row; }
  __device__ void load(const Part& tile, const Reporter&, Rows<Part::kRows>& values) const {
    load_from(which(tile), tile, values);
  }
  // The same where the tile in shared memory is known.
  __device__ void load_from(uint32_t from, const Part& tile, Rows<Part::kRows>& values) const {
    const auto row = static_cast<uint32_t>(tile.first_row);
    if constexpr (Tile::kIsMx) {
      values = {from, row, first_piece_of_warp() + threadIdx.x % 8};
    } else {
      const uint32_t piece = static_cast<uint32_t>(tile.column - tile.first_column) / kEight;
#pragma unroll
      for (int i = 0; i < Part::kRows; ++i) {
        values[i] = bits_as<Eight<Element>>(Tile::piece(from, row + i, piece));
      }
    }
  }
  // Of MXFP8, a warp's 64 columns are the tile's first or second.
  __device__ static uint32_t first_piece_of_warp() { return threadIdx.x / kWarp % 2 * 8; }

 private:
  __device__ uint32_t which(const Part& tile) const {
    const auto column = static_cast<uint32_t>(tile.first_column);
    return first_tile + (between.value == 0 ? 0 : between.quotient(column) % 2);
  }
};

template <int kScaling>
QuantizeTiles<TileRows<kScaling>> tiles_of(const QuantizeArgs& args,
                                           const TileRows<kScaling>& source,
                                           const ScaleBlocks& blocks) {
  QuantizeTiles<TileRows<kScaling>> tiles{};
  tiles.source = source;
  set_copies(tiles, args, blocks);
  tiles.capacity = blocks.groups.capacity;
  return tiles;
}

}  // namespace moire::cuda::ops
