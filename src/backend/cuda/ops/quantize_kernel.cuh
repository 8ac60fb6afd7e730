// The kernel of quantize and quantize_weight: a warp or a block per tile
// (quantize_tiles.cuh), which it reads once and writes as one copy or both. The activations'
// kernels quantise their tiles by the same functions (glu_tiles.cuh).
//
// Rowwise, the lanes that share a scale exchange their largest magnitudes. Columnwise, each thread
// has the largest of its rows; where a tile is a block's, shared memory has those of all warps, and
// a thread per column makes the scale. Where a magnitude is infinity's or NaN's, the maxima are
// taken again without NaN, and what was met is noted.
#pragma once

#include <type_traits>

#include "backend/cuda/device/non_finite.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/ops/column_sums.cuh"
#include "backend/cuda/ops/quantize_store.cuh"
#include "backend/cuda/ops/quantize_tiles.cuh"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {

// The first of this warp's elements that is infinite or NaN, noted.
template <int kScaling, class Source, class Values>
__device__ inline void note_first_of(const QuantizeTiles<Source>& args,
                                     const TilePart<kScaling>& tile, const Values& values,
                                     const Reporter& reporter, const NonFiniteReporter& notes) {
  using Shape = TileShape<kScaling>;
  uint32_t first = ~0U;  // counted along the tile's rows
#pragma unroll
  for (int i = 0; i < tile.kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
      const bool is_odd = (bit_cast<uint32_t>(values[i][j]) & 0x7FFFFFFFU) >= kInfinityBits;
      if (!is_odd || !tile.has_row(i)) continue;
      const auto row = static_cast<uint32_t>(tile.first_row + i);
      const auto column = static_cast<uint32_t>(tile.column - tile.first_column) + j;
      first = min(first, row * Shape::kColumns + column);
    }
  }
  const uint32_t of_warp = __reduce_min_sync(kAllLanes, first);
  if (of_warp == ~0U || threadIdx.x % kWarp != 0) return;
  int64_t row = tile.begin + of_warp / Shape::kColumns;
  if constexpr (requires { args.source.first_row; }) row += args.source.first_row;
  note_non_finite(notes, row, tile.first_column + of_warp % Shape::kColumns,
                  args.source.named_row(row, reporter));
}

// The same of rows that are read again: nobody waits for it where all is finite.
template <int kScaling, class Source>
__device__ __noinline__ void note_first(const QuantizeTiles<Source>& args,
                                        const TilePart<kScaling> tile, const Reporter& reporter,
                                        const NonFiniteReporter& notes) {
  Rows<kScaling, Source> values;
  args.source.load(tile, reporter, values);
  note_first_of(args, tile, values, reporter, notes);
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
  auto* const p = static_cast<typename S::Stored*>(to.scales) + tile.row(0) * to.scale_stride +
                  tile.column / S::kBlock;
  // A lane past the last column makes scales of its neighbours' rows.
  const int rows = tile.template rows_of_lanes<Shape::kLanes>();
  const auto make = [&](int i, float of_row, bool stores) {
    const auto scale = S::of(of_row, to.is_e5m2, args.fractional);
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

// The copy with scales along the rows; what was met.
template <Way kWay, int kScaling, class Source, class Values>
__device__ inline uint32_t quantize_rows(const QuantizeTiles<Source>& args,
                                         const TilePart<kScaling>& tile, const Values& values) {
  using Shape = TileShape<kScaling>;
  using S = Scales<kScaling>;
  constexpr int kRows = TilePart<kScaling>::kRows;
  const CopyTarget& to = args.rowwise;
  float amax[kRows];
  largest_of_rows<false, Shape::kLanes>(values, amax);
  Largest largest;
#pragma unroll
  for (const float of_row : amax) largest.add(of_row);
  const bool is_odd = __any_sync(kAllLanes, !largest.are_finite()) != 0;
  if (is_left<kWay, kScaling, Values>(to, largest)) return is_odd ? kIsOdd | kIsLeft : kIsLeft;
  if (is_odd) largest_of_rows<true, Shape::kLanes>(values, amax);
  make_row_scales(args, tile, amax);
  store_rows<kWay>(args, tile, to, values, [&](int i, int) { return amax[i]; });
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

template <int kScaling, class T>
struct ColumnMemory {
  static constexpr int kWarps = TileShape<kScaling>::kThreads / kWarp;
  static constexpr int kColumns = TileShape<kScaling>::kColumns;
  alignas(16) typename Magnitudes<T>::Bits most[kWarps][kColumns];
  alignas(16) float multipliers[kColumns];
};

// The largest magnitudes of all columns of the tile, that of column t for thread t.
template <bool kSkipsNan, int kScaling, class Rows, class T>
__device__ inline float share_columns(const Rows& values, ColumnMemory<kScaling, T>& memory) {
  using Shape = TileShape<kScaling>;
  using M = Magnitudes<T>;
  const Eight<T> most = largest_in_warp<kSkipsNan, kScaling>(values);
  if (threadIdx.x % kWarp < Shape::kPieces) {
    auto* to = &memory.most[threadIdx.x / kWarp][threadIdx.x % Shape::kPieces * kEight];
    *reinterpret_cast<Eight<T>*>(to) = most;
  }
  __syncthreads();
  if (threadIdx.x >= Shape::kColumns) return 0;
  uint32_t bits = 0;
#pragma unroll
  for (const auto& of_warp : memory.most) bits = max(bits, uint32_t{of_warp[threadIdx.x]});
  return M::to_float(static_cast<typename M::Bits>(bits));
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
    const auto scale = Scales<kScaling>::of(most[j], to.is_e5m2, args.fractional);
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
  using S = Scales<kScaling>;
  __shared__ ColumnMemory<kScaling, typename Source::Element> memory;
  const CopyTarget& to = args.columnwise;
  const auto make_scale = [&](float amax) {
    if (threadIdx.x >= Shape::kColumns) return;
    const auto scale = S::of(amax, to.is_e5m2, args.fractional);
    memory.multipliers[threadIdx.x] = scale.multiplier;
    const int column = tile.first_column + static_cast<int>(threadIdx.x);
    auto* row = static_cast<typename S::Stored*>(to.scales) + tile.index * to.scale_stride;
    if (column < args.source.columns && !to.is_values<kScaling>()) row[column] = scale.scale;
  };
  const float amax = share_columns<false, kScaling>(values, memory);
  const bool is_finite = bit_cast<uint32_t>(amax) < kInfinityBits;
  if (is_finite) make_scale(amax);
  const bool is_odd = __syncthreads_or(!is_finite) != 0;
  if (is_odd) {
    make_scale(share_columns<true, kScaling>(values, memory));
    __syncthreads();
  }
  float multipliers[kEight];
  const int first = static_cast<int>(threadIdx.x) % Shape::kPieces * kEight;
#pragma unroll
  for (int i = 0; i < kEight; ++i) multipliers[i] = memory.multipliers[first + i];
  if constexpr (kScaling == MOIRE_SCALING_FP8_BLOCK) {
    if (to.is_transposed) {
      store_transposed(args, tile, to, values, multipliers);
      return is_odd ? kIsOdd : 0;
    }
  }
  store_rows<kWay>(args, tile, to, values, [&](int, int j) { return multipliers[j]; });
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
  const auto scale = S::of(amax, to.is_e5m2, args.fractional);
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

// Whether tiles of such a source may be left.
template <int kScaling, class Source>
constexpr bool kLeavesTiles =
    kScaling == MOIRE_SCALING_MXFP8&& std::is_same_v<typename Source::Element, __nv_bfloat16>;

// Rows whose columns are summed, too: partial sums go to bias_parts, [blocks of 32 rows, columns].
struct SummedRows : FloatRows<__nv_bfloat16, true> {
  float* bias_parts;

  // The memory of a block's tiles, in the places of its threads' parts.
  template <class Shape>
  __device__ static auto& shared_tiles() {
    __shared__ uint4 tiles[Shape::kTiles][Shape::kRows][Shape::kPieces];
    return tiles;
  }
  // Nobody reads it any more when a copy is transposed.
  template <class Tile>
  __device__ TransposedTile<kEight>& transposed_tile(const Tile&) const {
    return *reinterpret_cast<TransposedTile<kEight>*>(&shared_tiles<typename Tile::Shape>());
  }
};

// Partial sums of a tile's columns: its threads exchange their rows through shared memory.
template <int kScaling>
__device__ inline void sum_columns(const SummedRows& source, const TilePart<kScaling>& tile,
                                   const Rows<kScaling, SummedRows>& values) {
  using Shape = TileShape<kScaling>;
  constexpr int kPairs = Shape::kColumns / 2;
  auto& pieces = SummedRows::shared_tiles<Shape>()[threadIdx.x / Shape::kTileThreads];
#pragma unroll
  for (int i = 0; i < tile.kRows; ++i) {
    pieces[tile.first_row + i][Shape::thread() % Shape::kPieces] = bits_as<uint4>(values[i]);
  }
  if constexpr (Shape::kIsWarps) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  const int pair = Shape::thread() % kPairs, column = tile.first_column + 2 * pair;
  if (column >= source.columns) return;
  const int64_t columns = source.columns;
  const int64_t index = partial_index<Shape::kRows>(tile.index, tile.begin);
  sum_part(source.bias_parts + index * columns + column, columns, Shape::thread() / kPairs,
           tile.tile_rows,
           [&](uint32_t row) { return reinterpret_cast<const uint32_t*>(pieces[row])[pair]; });
}

// All that is to be done of a tile that was left, which is read again: only few are.
template <int kScaling, class Source>
__device__ __noinline__ void quantize_any(const QuantizeTiles<Source>& args,
                                          const TilePart<kScaling> tile, const Reporter& reporter,
                                          const NonFiniteReporter& notes) {
  note_first(args, tile, reporter, notes);
  Rows<kScaling, Source> values;
  args.source.load(tile, reporter, values);
  quantize_copies<Way::kAny>(args, tile, values);
}

// Rows past the last group.
template <int kScaling, class Source>
__device__ __noinline__ void zero_tail_rows(const QuantizeTiles<Source>& args, int64_t in_use) {
  constexpr int64_t kScaleBytes = sizeof(typename Scales<kScaling>::Stored);
  for (const CopyTarget* copy : {&args.rowwise, &args.columnwise}) {
    if (!copy->is_present() || copy->is_transposed) continue;
    zero_bytes(copy->data, copy->stride, args.source.columns * copy->element_bytes<kScaling>(),
               in_use, args.capacity);
  }
  if (args.rowwise.scales == nullptr) return;
  zero_bytes(static_cast<uint8_t*>(args.rowwise.scales), args.rowwise.scale_stride * kScaleBytes,
             ceil_div(args.source.columns, Scales<kScaling>::kBlock) * kScaleBytes, in_use,
             args.capacity);
}

// What no group owns: rows past the last one, and columnwise scales of no block.
template <int kScaling, class Shape, class Source>
__device__ inline void zero_tail(const QuantizeTiles<Source>& args,
                                 const TilePart<kScaling, Shape>& tile, bool zeroes_rows = true) {
  const int64_t in_use = rows_in_use(args.blocks.groups);
  if (zeroes_rows && in_use < args.capacity) zero_tail_rows<kScaling>(args, in_use);
  const CopyTarget& to = args.columnwise;
  if (to.scales == nullptr || !tile.is_empty || tile.index >= to.scale_rows) return;
  auto* const row =
      static_cast<typename Scales<kScaling>::Stored*>(to.scales) + tile.index * to.scale_stride;
  const int end = min(tile.first_column + Shape::kColumns, args.source.columns);
  for (int i = tile.first_column + Shape::thread(); i < end; i += Shape::kTileThreads) row[i] = 0;
}

// Blocks that a multiprocessor is to hold, by what a thread keeps: loads under way matter more than
// a few registers.
template <int kScaling, class Source>
constexpr int kBlocksPerMultiprocessor = (sizeof(Rows<kScaling, Source>) >= 256  ? 512
                                          : sizeof(Rows<kScaling, Source>) >= 96 ? 768
                                                                                 : 1024) /
                                         TileShape<kScaling>::kThreads;

template <int kScaling, class Source>
__global__ void __launch_bounds__(TileShape<kScaling>::kThreads,
                                  kBlocksPerMultiprocessor<kScaling, Source>)
    quantize_kernel(const __grid_constant__ QuantizeTiles<Source> args,
                    const __grid_constant__ Reporter reporter,
                    const __grid_constant__ NonFiniteReporter notes) {
  if (blockIdx.x == 0) {
    check_groups(args.blocks.groups, reporter, threadIdx.x, TileShape<kScaling>::kThreads);
  }
  const TilePart<kScaling> tile(args.blocks, args.column_tiles, args.source.columns);
  if (args.zeroes_tail) zero_tail(args, tile);
  if (tile.is_empty) return;
  Rows<kScaling, Source> values;
  args.source.load(tile, reporter, values);
  if constexpr (std::is_same_v<Source, SummedRows>) sum_columns(args.source, tile, values);
  const uint32_t met = quantize_copies<Way::kQuick>(args, tile, values);
  if constexpr (kLeavesTiles<kScaling, Source>) {
    if (met >= kIsLeft) return quantize_any(args, tile, reporter, notes);
  }
  if (met == kIsOdd) note_first(args, tile, reporter, notes);
}

inline CopyTarget copy_target(const moire_quantized& q) {
  if (!is_present(q)) return {};
  const TensorView data(q.data), scales(q.scales);
  return {static_cast<uint8_t*>(data.data),
          data.stride() * dtype_size(data.type()),
          scales.is_present() ? scales.data : nullptr,
          scales.stride(),
          scales.num_rows(),
          data.type() == DType::kE5M2,
          false};
}
// A columnwise one, which may lie transposed.
inline CopyTarget columnwise_target(const moire_quantized& q, const moire_groups& groups) {
  CopyTarget target = copy_target(q);
  target.is_transposed = is_present(q) && is_transposed(q.data, q.scales, groups);
  return target;
}

// The tiles' copies, which the args of an op name, of a source with such blocks.
template <class Source>
void set_copies(QuantizeTiles<Source>& tiles, const auto& args, const ScaleBlocks& blocks) {
  tiles.blocks = blocks;
  tiles.rowwise = copy_target(args.rowwise);
  tiles.columnwise = columnwise_target(args.columnwise, blocks.groups);
  tiles.fractional = args.fractional_scales != 0;
}

// One launch over all tiles. `shape` is that of the copies.
template <int kScaling, class Source>
void launch_quantize(Launcher& launcher, QuantizeTiles<Source> args, const TensorView& shape,
                     const NonFiniteCall& call) {
  args.capacity = shape.num_rows();
  launch_tiles<TileShape<kScaling>>(launcher, quantize_kernel<kScaling, Source>, args,
                                    launcher.non_finite_reporter(call));
}

}  // namespace moire::cuda::ops
