// Where an activation's kernels leave what glu or glu_backward would store, and quantise it: tiles
// of 128 x 128 in shared memory, each as quantize has it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/device/glu_columns.cuh"
#include "backend/cuda/ops/glu_copies.h"
#include "backend/cuda/ops/quantize.h"
#include "backend/cuda/ops/quantize_kernel.cuh"

namespace moire::cuda::ops {

using Packed8 = Packed<__nv_bfloat16, kEight>;
constexpr uint32_t kGluTile = 128;

// Of z's rows: what lies where, and what becomes of it.
template <class Columns>
struct Gating {
  Matrix<const __nv_bfloat16> z;
  const float* probs;  // or null
  Columns columns;
  AnyActivation activation;

  __device__ float prob(int64_t row) const { return probs == nullptr ? 1.0F : probs[row]; }
};

// Tiles in shared memory. A row's pieces of eight columns change places so that eight threads meet
// all banks, whether they lie side by side or are two rows' pieces (as GradientPart writes).
struct SharedTiles {
  static constexpr uint32_t kPieces = kGluTile / kEight;  // of a row
  static constexpr size_t kBytes = size_t{kGluTile} * kGluTile * sizeof(__nv_bfloat16);

  __device__ static uint4* tile(uint32_t which) {
    extern __shared__ uint4 pieces[];
    return pieces + which * kGluTile * kPieces;
  }
  __device__ static uint4& piece(uint32_t which, uint32_t row, uint32_t piece) {
    const uint32_t place = piece ^ ((piece / 8 + which) % 2 * 2) ^ (row % 2 * 4);
    return tile(which)[row * kPieces + place];
  }
};

// Rows of one of those tiles: of grad_z by its first column, or of act.
struct TileRows {
  using Element = __nv_bfloat16;
  static constexpr bool kVectors = true, kIsDecoded = false;
  template <int kRows>
  using Rows = Eight<Element>[kRows];
  int columns;
  uint32_t block;       // of grad_z: tiles of a pair begin so many columns apart
  uint32_t first_tile;  // in shared memory

  __device__ int64_t named_row(int64_t row, const Reporter&) const { return row; }
  template <int kScaling, int kRows>
  __device__ void load(const TilePart<kScaling>& tile, const Reporter&,
                       Eight<Element> (&values)[kRows]) const {
    const uint32_t from = which(tile);
#pragma unroll
    for (int i = 0; i < kRows; ++i) values[i] = bits_as<Eight<Element>>(piece_of(from, tile, i));
  }
  // Of row i of a thread's part.
  template <class Tile>
  __device__ static uint4& piece_of(uint32_t which, const Tile& tile, int i) {
    return SharedTiles::piece(which, static_cast<uint32_t>(tile.first_row + i),
                              threadIdx.x % SharedTiles::kPieces);
  }
  // The rows' own memory, once they are in registers.
  template <class Tile>
  __device__ TransposedTile<kEight>& transposed_tile(const Tile& tile) const {
    static_assert(sizeof(TransposedTile<kEight>) <= SharedTiles::kBytes);
    return *reinterpret_cast<TransposedTile<kEight>*>(SharedTiles::tile(which(tile)));
  }

 private:
  template <class Tile>
  __device__ uint32_t which(const Tile& tile) const {
    const auto column = static_cast<uint32_t>(tile.first_column);
    return first_tile + (block == 0 ? 0 : column / block % 2);
  }
};

using GluTileShape = TileShape<MOIRE_SCALING_FP8_BLOCK>;
using GluTilePart = TilePart<MOIRE_SCALING_FP8_BLOCK>;
static_assert(GluTileShape::kThreads == 4 * kGluTile && GluTileShape::kColumns == kGluTile &&
              GluTileShape::kRows == kGluTile);

// The copies of a tile, whose rows lie in shared memory; and the tail's rows, if no other tile has
// zeroed them.
__device__ inline void quantize_shared(const QuantizeTiles<TileRows>& copies,
                                       const GluTilePart& tile, bool zeroes_rows,
                                       const Reporter& reporter, const NonFiniteReporter& notes) {
  if (copies.zeroes_tail) zero_tail(copies, tile, zeroes_rows);
  if (tile.is_empty) return;
  Rows<MOIRE_SCALING_FP8_BLOCK, TileRows> values;
  copies.source.load(tile, reporter, values);
  const uint32_t met = quantize_copies<Way::kQuick>(copies, tile, values);
  if (met == kIsOdd) note_first_of(copies, tile, values, reporter, notes);
}

template <class Columns>
Gating<Columns> gating_of(const auto& args, const Columns& columns) {
  return {matrix_of<const __nv_bfloat16>(args.z), vector_of<const float>(args.probs), columns,
          AnyActivation{args.activation}};
}

inline QuantizeTiles<TileRows> tiles_of(const QuantizeArgs& args, const TileRows& source,
                                        const ScaleBlocks& blocks) {
  QuantizeTiles<TileRows> tiles{};
  tiles.source = source;
  set_copies(tiles, args, blocks);
  tiles.capacity = blocks.groups.capacity;
  tiles.zeroes_tail = args.tail == MOIRE_TAIL_ZERO;
  return tiles;
}

// Blocks of threads, one at least: it zeroes the tail where there is nothing else.
inline LaunchShape shape_of(const ScaleBlocks& blocks, uint32_t column_tiles, uint32_t tiles) {
  const int64_t count = std::max<int64_t>(1, blocks.count(kGluTile)) * column_tiles;
  return {blocks_for(count, 1), GluTileShape::kThreads, tiles * SharedTiles::kBytes};
}

inline NonFiniteReporter notes_of(const Launcher& launcher, const Context& context, const char* op,
                                  const char* operand) {
  const Context within = context.within({op, operand});
  return launcher.non_finite_reporter(non_finite_call(within, {}, TensorView(), false));
}

// Calls f(Columns) for pieces of a layout.
template <class F>
void with_pieces(const ResolvedGluLayout& layout, F&& f) {
  if (!layout.is_gated) return f(GluGates<kEight>());
  if (layout.block == 1) return f(GluPairs<kEight>(layout));
  return f(GluBlocks<kEight>(layout));
}

}  // namespace moire::cuda::ops
