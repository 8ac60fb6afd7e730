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
         tile.column / S::kBlock * (S::kIsMx ? 1 : to.scale_step);
}

// The scales of a part's rows, of which `amax` become the multipliers. FP32 scales take divisions:
// of the lanes that share some, each makes one.
template <int kScaling, class Source>
__device__ inline void make_row_scales(const QuantizeTiles<Source>& args,
                                       const TilePart<kScaling>& tile,
                                       float (&amax)[TilePart<kScaling>::kRows]) {
  using Shape = TileShape<kScaling>;
  using S = Scales<kScaling>;
  constexpr int kRows = TilePart<kScaling>::kRows;
  const CopyTarget& to = args.rowwise;
  const auto lane = static_cast<int>(threadIdx.x % Shape::kLanes);
  auto* const p = row_scales<kScaling>(to, tile);
  // A lane past the last column makes scales of its neighbours' rows.
  const int rows = tile.template rows_of_lanes<Shape::kLanes>();
  const auto make = [&](int i, float of_row, bool stores) {
    const auto scale = S::of(of_row, to.is_e5m2, args.is_fractional());
    if (stores && i < rows && !to.is_values<kScaling>()) {
      p[i * to.scale_stride] = scale.scale;
    }
    return scale.multiplier;
  };
  if constexpr (S::kIsMx) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) amax[i] = make(i, amax[i], lane == 0);
  } else {
    static_assert(kRows <= Shape::kLanes);
    float own[kRows];  // the lane's row comes first, by halves: an index would need memory
#pragma unroll
    for (int i = 0; i < kRows; ++i) own[i] = amax[i];
#pragma unroll
    for (int half = kRows / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) own[i] = (lane & half) != 0 ? own[i + half] : own[i];
    }
    const float multiplier = make(lane % kRows, own[0], lane < kRows);
#pragma unroll
    for (int i = 0; i < kRows; ++i) amax[i] = __shfl_sync(kAllLanes, multiplier, i, kRows);
  }
}

// The same of MXFP8 that is folded: `amax` are of a row's block, with whose lanes those of the
// folded one's others tell each other codes, two rows' in a word, each below a bit that says
// whether the block has an element other than 0: where its code is above 0 it always has, so the
// largest of both is that of the codes.
template <int kScaling, class Source>
__device__ inline void fold_rows(const QuantizeTiles<Source>& args, const TilePart<kScaling>& tile,
                                 const float (&amax)[4], FoldedMultiplier (&multipliers)[4]) {
  using Shape = TileShape<kScaling>;
  const CopyTarget& to = args.rowwise;
  constexpr uint32_t kIsNonzero = 0x100, kCode = 0xFF;
  const auto code = [&](int i) {
    const bool is_nonzero = has_nonzero(amax[i], to.is_e5m2);
    return mx_scale_of(amax[i], to.is_e5m2).scale | (is_nonzero ? kIsNonzero : 0);
  };
  const uint32_t codes[2] = {code(0) | code(1) << 16, code(2) | code(3) << 16};
  const auto lane = static_cast<int>(threadIdx.x % Shape::kLanes);
  const int rows = tile.template rows_of_lanes<Shape::kLanes>();
  float* const p = row_scales<kScaling>(to, tile);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t folded = codes[half];
#pragma unroll
    for (int lanes = Shape::kBlockLanes; lanes < Shape::kLanes; lanes *= 2) {
      folded = __vmaxu2(folded, __shfl_xor_sync(kAllLanes, folded, lanes));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * half + i;
      const uint32_t of_row = folded >> 16 * i & kCode;
      multipliers[row] = FoldedMultiplier::of(codes[half] >> 16 * i & kCode, of_row, to.is_e5m2);
      if (lane == row && row < rows) {
        const bool is_nonzero = (folded >> 16 * i & kIsNonzero) != 0;
        p[row * to.scale_stride] = fold_scale(static_cast<uint8_t>(of_row), is_nonzero);
      }
    }
  }
}

// The copy with scales along the rows; what was met.
template <Way kWay, int kScaling, class Source, class Values>
__device__ inline uint32_t quantize_rows(const QuantizeTiles<Source>& args,
                                         const TilePart<kScaling>& tile, const Values& values) {
  using Shape = TileShape<kScaling>;
  using S = Scales<kScaling>;
  constexpr int kRows = TilePart<kScaling>::kRows;
  const CopyTarget& to = args.rowwise;
  float amax[kRows];
  largest_of_rows<false, Shape::kBlockLanes>(values, amax);
  Largest largest;
#pragma unroll
  for (const float of_row : amax) largest.add(of_row);
  const bool is_odd = __any_sync(kAllLanes, !largest.are_finite()) != 0;
  if (is_left<kWay, kScaling, Values>(to, largest)) return is_odd ? kIsOdd | kIsLeft : kIsLeft;
  if (is_odd) largest_of_rows<true, Shape::kBlockLanes>(values, amax);
  if constexpr (Scales<kScaling>::kIsFolded) {
    FoldedMultiplier multipliers[kRows];
    fold_rows(args, tile, amax, multipliers);
    store_rows<kWay>(args, tile, to, values, [&](int i, int) { return multipliers[i]; });
  } else {
    make_row_scales(args, tile, amax);
    store_rows<kWay>(args, tile, to, values, [&](int i, int) { return amax[i]; });
  }
  return is_odd ? kIsOdd : 0;
}

// Largest magnitudes of eight columns, packed as their elements are.
template <bool kSkipsNan, int kRows, class Rows>
__device__ inline auto largest_of_columns(const Rows& values) {
  using T = ElementOf<Rows>;
  using M = Magnitudes<T>;
  Eight<T> most{};
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const Eight<T>& row = values[k];
#pragma unroll
    for (int i = 0; i < Eight<T>::kWords; ++i) {
      most.words[i] = M::template larger<kSkipsNan>(most.words[i], M::of(row.words[i]));
    }
  }
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

template <int kScaling>
using MultiplierOf = std::conditional_t<Scales<kScaling>::kIsFolded, FoldedMultiplier, float>;

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
  const auto of_pair = static_cast<int>(threadIdx.x) / Shape::kColumns;
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
  const int first = static_cast<int>(threadIdx.x) % Shape::kPieces * kEight;
  int block = Shape::kBlocks == 1 ? 0 : tile.first_row / (Shape::kRows / Shape::kBlocks);
  if (tile.is_pair) block = static_cast<int>(threadIdx.x) / (Shape::kThreads / 2);
#pragma unroll
  for (int i = 0; i < kEight; ++i) multipliers[i] = memory.multipliers[block][first + i];
  const auto multiplier = [&](int, int j) { return multipliers[j]; };
  if constexpr (kHasLongLines<kScaling>) {
    if (args.is_transposed(to)) {
      store_transposed(args, tile, to, values, multiplier);
      return is_odd ? kIsOdd : 0;
    }
  }
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
  }
  uint32_t met = 0;
  if (args.rowwise.is_present()) met = quantize_rows<kWay>(args, tile, values);
  if (args.columnwise.is_present()) {
    if constexpr (TileShape<kScaling>::kIsWarps) {
      met |= quantize_columns_of_warp<kWay>(args, tile, values);
    } else {
      met |= quantize_columns<kWay>(args, tile, values);
    }
  }
  return met;
}

}  // namespace moire::cuda::ops
