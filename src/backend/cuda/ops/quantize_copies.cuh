// The copies of a tile, from its rows in registers: largest magnitudes, the scales that they make,
// and codes or values. The activations' kernels quantise their tiles by the same functions
// (glu_tiles.cuh).
//
// Rowwise, the lanes that share a scale exchange their largest magnitudes. Columnwise, each thread
// has the largest of its rows; where a tile is a block's, shared memory has those of all warps, and
// a thread per column makes the scale. Where a magnitude is infinity's or NaN's, the maxima are
// taken again without NaN, and what was met is told. MXFP8 that is folded has the scales of its
// blocks of 32 first, and then those of which they become parts.
#pragma once

#include <type_traits>

#include "backend/cuda/device/row_blocks.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/ops/quantize_store.cuh"
#include "backend/cuda/ops/quantize_tiles.cuh"

namespace moire::cuda::ops {

// Where a part's rows have their scales.
template <int kScaling, class Tile>
__device__ inline auto* row_scales(const CopyTarget& to, const Tile& tile) {
  using S = Scales<kScaling>;
  return static_cast<typename S::Stored*>(to.scales) + tile.row(0) * to.scale_stride +
         static_cast<uint32_t>(tile.column) / S::kBlock * (S::kIsMx ? 1 : to.scale_step);
}

template <int kScaling>
using MultiplierOf = std::conditional_t<Scales<kScaling>::kIsFolded, FoldedMultiplier, float>;

// What the lane `lane` of kLanes neighbours has.
template <int kLanes>
__device__ inline float of_lane(float multiplier, int lane) {
  return __shfl_sync(kAllLanes, multiplier, lane, kLanes);
}
template <int kLanes>
__device__ inline FoldedMultiplier of_lane(const FoldedMultiplier& multiplier, int lane) {
  return {__shfl_sync(kAllLanes, multiplier.bits, lane, kLanes)};
}

// The scales of MXFP8 of a part's rows, of which `amax` become the multipliers.
template <int kScaling, class Source, int kRows>
__device__ inline void make_row_scales(const QuantizeTiles<Source>& args,
                                       const TilePart<kScaling>& tile, float (&amax)[kRows]) {
  using Shape = TileShape<kScaling>;
  const CopyTarget& to = args.rowwise;
  auto* const p = row_scales<kScaling>(to, tile);
  const bool stores = threadIdx.x % Shape::kLanes == 0 && !to.is_values<kScaling>();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const auto scale = Scales<kScaling>::of(amax[i], to.is_e5m2, args.is_fractional());
    if (stores && tile.has_row(i)) p[i * to.scale_stride] = scale.scale;
    amax[i] = scale.multiplier;
  }
}

// A block of 32 that becomes part of a folded one.
class FoldedBlock {
 public:
  __device__ FoldedBlock(float amax, bool is_e5m2)
      : code_(mx_scale_of(amax, is_e5m2).scale), is_nonzero_(has_nonzero(amax, is_e5m2)) {}

  // The largest code of all parts, which lanes kLanes, 2 kLanes ... below kEnd away have, below a
  // bit that says whether one has an element other than 0: where its code is above 0 it always has.
  template <int kLanes, int kEnd>
  __device__ uint32_t folded() const {
    uint32_t most = code_ | (is_nonzero_ ? kIsNonzero : 0);
#pragma unroll
    for (int lanes = kLanes; lanes < kEnd; lanes *= 2) {
      most = max(most, __shfl_xor_sync(kAllLanes, most, lanes));
    }
    return most;
  }
  __device__ static float scale(uint32_t folded) {
    return fold_scale(static_cast<uint8_t>(folded), folded >= kIsNonzero);
  }
  __device__ FoldedMultiplier multiplier(uint32_t folded, bool is_e5m2) const {
    return FoldedMultiplier::of(code_, folded % kIsNonzero, is_e5m2);
  }

 private:
  static constexpr uint32_t kIsNonzero = 0x100;
  uint32_t code_;
  bool is_nonzero_;
};

// A lane's own scale of a copy, given to `store`; what its elements are multiplied by. `amax` is
// that of the scale's block or, of MXFP8 that is folded, of the lane's part, and those of the
// others lie kLanes, 2 kLanes ... below kEnd lanes away.
template <int kScaling, int kLanes, int kEnd, class Source, class Store>
__device__ inline MultiplierOf<kScaling> own_scale(const QuantizeTiles<Source>& args,
                                                   const CopyTarget& to, float amax,
                                                   Store&& store) {
  if constexpr (Scales<kScaling>::kIsFolded) {
    const FoldedBlock block(amax, to.is_e5m2);
    const uint32_t folded = block.template folded<kLanes, kEnd>();
    store(FoldedBlock::scale(folded));
    return block.multiplier(folded, to.is_e5m2);
  } else {
    const auto scale = Scales<kScaling>::of(amax, to.is_e5m2, args.is_fractional());
    store(scale.scale);
    return scale.multiplier;
  }
}

// The scale of a lane's row where lanes have one of four each; what the row's elements are
// multiplied by.
template <int kScaling, class Source>
__device__ inline MultiplierOf<kScaling> own_row_scale(const QuantizeTiles<Source>& args,
                                                       const TilePart<kScaling>& tile, float amax) {
  using Shape = TileShape<kScaling>;
  const CopyTarget& to = args.rowwise;
  const auto lane = static_cast<int>(threadIdx.x % Shape::kLanes);
  // A lane past the last column makes the scale of its neighbours' row.
  const int rows = tile.template rows_of_lanes<Shape::kLanes>();
  const auto store = [&](float scale) {
    if (lane < min(rows, 4)) row_scales<kScaling>(to, tile)[lane * to.scale_stride] = scale;
  };
  return own_scale<kScaling, Shape::kBlockLanes, Shape::kLanes>(args, to, amax, store);
}

// The copy with scales along the rows, where each of the lanes that share one makes that of one of
// four rows; what was met.
template <Way kWay, int kScaling, class Source, class Values>
__device__ inline uint32_t quantize_long_rows(const QuantizeTiles<Source>& args,
                                              const TilePart<kScaling>& tile,
                                              const Values& values) {
  constexpr int kLanes = TileShape<kScaling>::kBlockLanes;
  static_assert(TilePart<kScaling>::kRows == 4);
  float amax = largest_of_own_row<false, kLanes>(values);
  const bool is_odd = __any_sync(kAllLanes, bit_cast<uint32_t>(amax) >= kInfinityBits) != 0;
  if (is_odd) amax = largest_of_own_row<true, kLanes>(values);
  const MultiplierOf<kScaling> own = own_row_scale(args, tile, amax);
  MultiplierOf<kScaling> multipliers[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) multipliers[i] = of_lane<4>(own, i);
  store_rows<kWay>(args, tile, args.rowwise, values, [&](int i, int) { return multipliers[i]; });
  return is_odd ? kIsOdd : 0;
}

// The same of MXFP8, where a lane makes the scales of all of its rows.
template <Way kWay, int kScaling, class Source, class Values>
__device__ inline uint32_t quantize_short_rows(const QuantizeTiles<Source>& args,
                                               const TilePart<kScaling>& tile,
                                               const Values& values) {
  constexpr int kRows = TilePart<kScaling>::kRows, kLanes = TileShape<kScaling>::kLanes;
  const CopyTarget& to = args.rowwise;
  float amax[kRows];
  largest_of_rows<false, kLanes>(values, amax);
  Largest largest;
#pragma unroll
  for (const float of_row : amax) largest.add(of_row);
  const bool is_odd = __any_sync(kAllLanes, !largest.are_finite()) != 0;
  if (is_left<kWay, kScaling, Values>(to, largest)) return is_odd ? kIsOdd | kIsLeft : kIsLeft;
  if (is_odd) largest_of_rows<true, kLanes>(values, amax);
  make_row_scales(args, tile, amax);
  store_rows<kWay>(args, tile, to, values, [&](int i, int) { return amax[i]; });
  return is_odd ? kIsOdd : 0;
}

// The copy with scales along the rows; what was met.
template <Way kWay, int kScaling, class Source, class Values>
__device__ inline uint32_t quantize_rows(const QuantizeTiles<Source>& args,
                                         const TilePart<kScaling>& tile, const Values& values) {
  if constexpr (Scales<kScaling>::kIsMx) {
    return quantize_short_rows<kWay>(args, tile, values);
  } else {
    return quantize_long_rows<kWay>(args, tile, values);
  }
}

// Largest magnitudes of eight columns, packed as their elements are.
template <bool kSkipsNan, int kRows, class Rows>
__device__ inline auto largest_of_columns(const Rows& values) {
  using T = ElementOf<Rows>;
  using M = Magnitudes<T>;
  Eight<T> most = kSkipsNan ? Eight<T>{} : values[0];
#pragma unroll
  for (int k = kSkipsNan ? 0 : 1; k < kRows; ++k) {
    const Eight<T>& row = values[k];
#pragma unroll
    for (int i = 0; i < Eight<T>::kWords; ++i) {
      most.words[i] = M::template larger_element<kSkipsNan>(most.words[i], row.words[i]);
    }
  }
#pragma unroll
  for (uint32_t& word : most.words) word = M::of(word);
  return most;
}

// The same of all rows of a warp.
template <bool kSkipsNan, int kScaling, class Rows>
__device__ inline auto largest_in_warp(const Rows& values) {
  using T = ElementOf<Rows>;
  using Shape = TileShape<kScaling>;
  Eight<T> most = largest_of_columns<kSkipsNan, Shape::kRowsPerThread>(values);
#pragma unroll
  for (int lanes = Shape::kPieces; lanes < kWarp; lanes *= 2) {
#pragma unroll
    for (uint32_t& word : most.words) {
      word =
          Magnitudes<T>::template larger<kSkipsNan>(word, __shfl_xor_sync(kAllLanes, word, lanes));
    }
  }
  return most;
}

template <int kScaling, class T>
struct ColumnMemory {
  static constexpr int kWarps = TileShape<kScaling>::kThreads / kWarp;
  static constexpr int kColumns = TileShape<kScaling>::kColumns;
  static constexpr int kBlocks = TileShape<kScaling>::kBlocks;
  alignas(16) typename Magnitudes<T>::Bits most[kWarps][kColumns];
  // Of a tile's blocks, or of the tiles of a pair.
  alignas(16) MultiplierOf<kScaling> multipliers[kBlocks == 1 ? 2 : kBlocks][kColumns];
};

// Whether there is a column for this thread to make the scale of.
template <int kScaling>
__device__ inline bool has_column(const TilePart<kScaling>& tile) {
  return threadIdx.x < TileShape<kScaling>::kColumns * (1 + tile.is_pair);
}

// The largest magnitudes of the blocks of all columns of the tile, or of a pair's, those of column
// t for thread t.
template <bool kSkipsNan, int kScaling, class Rows, class T, int kBlocks>
__device__ inline void share_columns(const TilePart<kScaling>& tile, const Rows& values,
                                     ColumnMemory<kScaling, T>& memory, float (&amax)[kBlocks]) {
  using Shape = TileShape<kScaling>;
  using M = Magnitudes<T>;
  const Eight<T> most = largest_in_warp<kSkipsNan, kScaling>(values);
  if (threadIdx.x % kWarp < Shape::kPieces) {
    auto* to = &memory.most[threadIdx.x / kWarp][threadIdx.x % Shape::kPieces * kEight];
    *reinterpret_cast<Eight<T>*>(to) = most;
  }
  __syncthreads();
  constexpr int kAll = ColumnMemory<kScaling, T>::kWarps, kWarps = kAll / kBlocks;
  const auto of_pair = static_cast<int>(threadIdx.x / Shape::kColumns);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    uint32_t bits = 0;
#pragma unroll
    for (int w = kWarps * b; has_column(tile) && w < kWarps * (b + 1); ++w) {
      if (tile.is_pair && w / (kAll / 2) != of_pair) continue;
      bits = max(bits, uint32_t{memory.most[w][threadIdx.x % Shape::kColumns]});
    }
    amax[b] = M::to_float(static_cast<typename M::Bits>(bits));
  }
}

// The scales of one of the tile's columns, in memory and where they are stored.
template <int kScaling, class Source, class T>
__device__ inline void make_column_scale(const QuantizeTiles<Source>& args,
                                         const TilePart<kScaling>& tile, const float (&amax)[1],
                                         ColumnMemory<kScaling, T>& memory) {
  using S = Scales<kScaling>;
  const CopyTarget& to = args.columnwise;
  const auto scale = S::of(amax[0], to.is_e5m2, args.is_fractional());
  constexpr int kColumns = TileShape<kScaling>::kColumns;
  memory.multipliers[threadIdx.x / kColumns][threadIdx.x % kColumns] = scale.multiplier;
  const int column = tile.first_column + static_cast<int>(threadIdx.x);
  auto* row = static_cast<typename S::Stored*>(to.scales) + tile.index * to.scale_stride;
  if (column < args.source.columns && !to.is_values<kScaling>()) row[column] = scale.scale;
}
// The same of MXFP8, folded or, beside a folded copy, not.
template <int kScaling, class Source, class T>
__device__ inline void make_column_scale(const QuantizeTiles<Source>& args,
                                         const TilePart<kScaling>& tile, const float (&amax)[4],
                                         ColumnMemory<kScaling, T>& memory) {
  const CopyTarget& to = args.columnwise;
  uint32_t codes[4], folded = 0;
  bool is_nonzero = false;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    codes[b] = mx_scale_of(amax[b], to.is_e5m2).scale;
    folded = max(folded, codes[b]);
    is_nonzero = is_nonzero || has_nonzero(amax[b], to.is_e5m2);
  }
  const int column = tile.first_column + static_cast<int>(threadIdx.x);
  const bool is_there = column < args.source.columns;
  if (is_there && !to.has_e8m0_scales) {
    static_cast<float*>(to.scales)[tile.index * to.scale_stride + column] =
        fold_scale(static_cast<uint8_t>(folded), is_nonzero);
  }
  const int64_t index = partial_index<128>(tile.index, tile.begin);
  auto* const bytes = static_cast<uint8_t*>(to.scales) + index * to.scale_stride + column;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    memory.multipliers[b][threadIdx.x] =
        FoldedMultiplier::of(codes[b], to.has_e8m0_scales ? codes[b] : folded, to.is_e5m2);
    if (is_there && to.has_e8m0_scales && 32 * b < tile.tile_rows) {
      bytes[b * to.scale_stride] = static_cast<uint8_t>(codes[b]);
    }
  }
}

// The copy with scales down the columns of a warp's tile; what was met.
template <Way kWay, int kScaling, class Source, class Values>
__device__ inline uint32_t quantize_columns_of_warp(const QuantizeTiles<Source>& args,
                                                    const TilePart<kScaling>& tile,
                                                    const Values& values) {
  using Shape = TileShape<kScaling>;
  const CopyTarget& to = args.columnwise;
  auto most = largest_in_warp<false, kScaling>(values);
  Largest largest;
#pragma unroll
  for (int j = 0; j < kEight; ++j) largest.add(most[j]);
  const bool is_odd = __any_sync(kAllLanes, !largest.are_finite()) != 0;
  if (is_left<kWay, kScaling, Values>(to, largest)) return is_odd ? kIsOdd | kIsLeft : kIsLeft;
  if (is_odd) most = largest_in_warp<true, kScaling>(values);
  float multipliers[kEight];
  uint32_t scales[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < kEight; ++j) {
    const auto scale = Scales<kScaling>::of(most[j], to.is_e5m2, args.is_fractional());
    multipliers[j] = scale.multiplier;
    scales[j / 4] |= uint32_t{scale.scale} << (8 * (j % 4));
  }
  const int left = args.source.columns - tile.column;
  if (!to.is_values<kScaling>() && Shape::thread() < Shape::kPieces && left > 0) {
    store_bytes<Source::kVectors>(
        static_cast<uint8_t*>(to.scales) + tile.index * to.scale_stride + tile.column, left,
        scales);
  }
  store_rows<kWay>(args, tile, to, values, [&](int, int j) { return multipliers[j]; });
  return is_odd ? kIsOdd : 0;
}

// The copy with scales down the columns; what was met.
template <Way kWay, int kScaling, class Source, class Values>
__device__ inline uint32_t quantize_columns(const QuantizeTiles<Source>& args,
                                            const TilePart<kScaling>& tile, const Values& values) {
  using Shape = TileShape<kScaling>;
  __shared__ ColumnMemory<kScaling, typename Source::Element> memory;
  const CopyTarget& to = args.columnwise;
  float amax[Shape::kBlocks];
  Largest largest;
  share_columns<false>(tile, values, memory, amax);
  // That meeting shows a source's runs; the next one lets them be overwritten.
  if constexpr (kIsSummed<Source>) args.source.add_runs(tile);
#pragma unroll
  for (const float of_block : amax) largest.add(of_block);
  const bool is_finite = largest.are_finite();
  if (is_finite && has_column(tile)) make_column_scale(args, tile, amax, memory);
  const bool is_odd = __syncthreads_or(!is_finite) != 0;
  if (is_odd) {
    share_columns<true>(tile, values, memory, amax);
    if (has_column(tile)) make_column_scale(args, tile, amax, memory);
    __syncthreads();
  }
  MultiplierOf<kScaling> multipliers[kEight];
  const int first = static_cast<int>(threadIdx.x % Shape::kPieces * kEight);
  int block = Shape::kBlocks == 1 ? 0 : tile.first_row / (Shape::kRows / Shape::kBlocks);
  if (tile.is_pair) block = static_cast<int>(threadIdx.x / (Shape::kThreads / 2));
#pragma unroll
  for (int i = 0; i < kEight; ++i) multipliers[i] = memory.multipliers[block][first + i];
  const auto multiplier = [&](int, int j) { return multipliers[j]; };
  store_rows<kWay>(args, tile, to, values, multiplier);
  return is_odd ? kIsOdd : 0;
}

// The tile with one scale; what was met.
template <Way kWay, int kScaling, class Source, class Values>
__device__ inline uint32_t quantize_tile(const QuantizeTiles<Source>& args,
                                         const TilePart<kScaling>& tile, const Values& values) {
  using Shape = TileShape<kScaling>;
  using S = Scales<kScaling>;
  using T = typename Source::Element;
  __shared__ float most[2][Shape::kThreads / kWarp];
  const CopyTarget& to = args.rowwise;
  const auto share = [&](const Eight<T>& of_thread, int which) {
    const Eight<T> one[2] = {of_thread, {}};
    float amax[2];
    largest_of_rows<false, kWarp>(one, amax);
    if (threadIdx.x % kWarp == 0) most[which][threadIdx.x / kWarp] = amax[0];
    __syncthreads();
    uint32_t bits = 0;
#pragma unroll
    for (const float of_warp : most[which]) bits = max(bits, bit_cast<uint32_t>(of_warp));
    return bit_cast<float>(bits);
  };
  float amax = share(largest_of_columns<false, tile.kRows>(values), 0);
  const bool is_odd = bit_cast<uint32_t>(amax) >= kInfinityBits;  // of all threads alike
  if (is_odd) amax = share(largest_of_columns<true, tile.kRows>(values), 1);
  const auto scale = S::of(amax, to.is_e5m2, args.is_fractional());
  if (threadIdx.x == 0) {
    static_cast<typename S::Stored*>(
        to.scales)[tile.index * to.scale_stride + tile.first_column / S::kBlock] = scale.scale;
  }
  store_rows<kWay>(args, tile, to, values, [&](int, int) { return scale.multiplier; });
  return is_odd ? kIsOdd : 0;
}

// The copies of a tile; what was met.
template <Way kWay, int kScaling, class Source, class Values>
__device__ inline uint32_t quantize_copies(const QuantizeTiles<Source>& args,
                                           const TilePart<kScaling>& tile, const Values& values) {
  if constexpr (kScaling == MOIRE_SCALING_FP8_TILE) {
    return quantize_tile<kWay>(args, tile, values);
  } else {
    uint32_t met = 0;
    if (args.rowwise.is_present()) met = quantize_rows<kWay>(args, tile, values);
    if (!args.columnwise.is_present()) return met;
    if constexpr (TileShape<kScaling>::kIsWarps) {
      return met | quantize_columns_of_warp<kWay>(args, tile, values);
    } else {
      return met | quantize_columns<kWay>(args, tile, values);
    }
  }
}

}  // namespace moire::cuda::ops
