// The kernel of quantize and quantize_weight: a warp or a block per tile (quantize_tiles.cuh),
// which it reads once and writes as one copy or both (quantize_copies.cuh, and where columns lie
// transposed quantize_transposed.cuh). Elements that are infinite or NaN are noted.
#pragma once

#include <cuda_pipeline.h>

#include <type_traits>
#include <utility>

#include "backend/cuda/device/non_finite.cuh"
#include "backend/cuda/device/shared.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/ops/quantize_copies.cuh"
#include "backend/cuda/ops/quantize_tiles.cuh"
#include "backend/cuda/ops/quantize_transposed.cuh"
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

// Rows whose columns are summed, too: partial sums go to bias_parts, [blocks of 32 rows, columns].
// Each thread sums runs of its own rows (core/row_sums.h); a tile's threads exchange those.
template <class T>
struct SummedRows : FloatRows<T, true> {
  float* bias_parts;

  // The runs of a tile.
  template <class Shape>
  __device__ static auto& runs_of_tile() {
    alignas(16) __shared__ float runs[Shape::kTiles][Shape::kRows / kRunRows][Shape::kColumns];
    return runs[threadIdx.x / Shape::kTileThreads];
  }

  // This thread's runs, for the tile's others. Those of a block's tile before it have been added.
  template <int kScaling>
  __device__ static void put_runs(const TilePart<kScaling>& tile,
                                  const Rows<kScaling, SummedRows>& values) {
    using Shape = TileShape<kScaling>;
    static_assert(Shape::kRowsPerThread % kRunRows == 0);
    auto& runs = runs_of_tile<Shape>();
#pragma unroll
    for (int first = 0; first < Shape::kRowsPerThread; first += kRunRows) {
      if (first > 0) __syncwarp();  // or the compiler has all rows' floats at once, which spill
      Eight<float> sum{};
#pragma unroll
      for (int i = first; i < first + kRunRows; ++i) {
#pragma unroll
        for (int j = 0; j < kEight; ++j) sum.set(j, sum[j] + values[i][j]);
      }
      float* const to =
          &runs[(tile.first_row + first) / kRunRows][Shape::thread() % Shape::kPieces * kEight];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(sum.words)[i];
      }
    }
  }
  // The sums of blocks, once all runs are there.
  template <int kScaling>
  __device__ void add_runs(const TilePart<kScaling>& tile) const {
    using Shape = TileShape<kScaling>;
    constexpr int kColumns = Shape::kColumns, kRunsOfBlock = kBlockRows / kRunRows;
    constexpr int kBlocks = Shape::kRows / kBlockRows;
    constexpr int kAtOnce = kColumns * kBlocks / Shape::kTileThreads;  // columns of a thread
    static_assert(Shape::kTileThreads * kAtOnce == kColumns * kBlocks);
    const auto& runs = runs_of_tile<Shape>();
    const int column = Shape::thread() * kAtOnce % kColumns;
    const int block = Shape::thread() * kAtOnce / kColumns;
    if (tile.first_column + column >= this->columns || block * kBlockRows >= tile.tile_rows) return;
    Packed<float, kAtOnce> sum{};
#pragma unroll 4
    for (int r = 0; r < kRunsOfBlock; ++r) {
      const auto run = load<kAtOnce>(&runs[block * kRunsOfBlock + r][column]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum.set(i, sum[i] + run[i]);
    }
    const int64_t index = partial_index<Shape::kRows>(tile.index, tile.begin) + block;
    store(bias_parts + index * this->columns + tile.first_column + column, sum);
  }
};

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
  if (args.rowwise.scales == nullptr || args.rowwise.scale_step > 1) return;
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

// The same of a span whose rows no group owns.
template <class Args, class PartAt>
__device__ inline void zero_span(const Args& args, uint32_t first, uint32_t end, PartAt&& part_at) {
  for (uint32_t i = first; args.zeroes_tail && i < end; ++i) {
    zero_tail(args, part_at(i), i == first);
  }
}

// Blocks that a multiprocessor is to hold, by what a thread keeps: loads under way matter more than
// a few registers.
template <int kScaling, class Source>
constexpr int kBlocksPerMultiprocessor = (sizeof(Rows<kScaling, Source>) >= 256  ? 512
                                          : sizeof(Rows<kScaling, Source>) >= 96 ? 768
                                                                                 : 1024) /
                                         TileShape<kScaling>::kThreads;

// The runs of a tile that is not empty.
template <int kScaling, class Source, class Values>
__device__ inline void put_runs(const QuantizeTiles<Source>& args, const TilePart<kScaling>& tile,
                                Values& values) {
  args.source.put_runs(tile, values);
  // The floats that were added are made again where they are encoded: kept, they would spill.
  for (auto& row : values) {
    for (uint32_t& word : row.words) asm volatile("" : "+r"(word));
  }
}

// The sums of such a tile. Where a block has columnwise scales to make, it meets for these anyway
// (quantize_columns).
template <int kScaling, class Source, class Values>
__device__ inline void sum_runs(const QuantizeTiles<Source>& args, const TilePart<kScaling>& tile,
                                Values& values) {
  put_runs(args, tile, values);
  if constexpr (TileShape<kScaling>::kIsWarps) {
    __syncwarp();
    args.source.add_runs(tile);
  } else if (!args.columnwise.is_present()) {
    __syncthreads();
    args.source.add_runs(tile);
    __syncthreads();
  }
}

// Whether a thread asks for its part of a source's tile while the one before is quantised: not
// where MXFP8 is folded beside sums, whose registers would spill.
template <int kScaling, class Source>
constexpr bool kAsksAhead =
    Source::kAskedBytes != 0 && !(kScaling == kFoldedMx && kIsSummed<Source>);

// All that is to be done of a tile that is not empty, from its rows.
template <int kScaling, class Source>
__device__ inline void quantize_values(const QuantizeTiles<Source>& args,
                                       const TilePart<kScaling>& tile,
                                       Rows<kScaling, Source>& values, const Reporter& reporter,
                                       const NonFiniteReporter& notes) {
  if constexpr (kIsSummed<Source>) sum_runs(args, tile, values);
  const uint32_t met = quantize_copies<Way::kQuick>(args, tile, values);
  if constexpr (kScaling == MOIRE_SCALING_MXFP8 &&
                kRoundsValues<Way::kQuick, Rows<kScaling, Source>>) {
    if (met >= kIsLeft) return quantize_any(args, tile, reporter, notes);
  }
  if (met == kIsOdd) note_first(args, tile, reporter, notes);
}

// The same of this block's span, and then what no group owns: nothing that can wait before loads.
template <int kScaling, class Source>
__device__ inline void quantize_span(const QuantizeTiles<Source>& args, const Reporter& reporter,
                                     const NonFiniteReporter& notes) {
  using Shape = TileShape<kScaling>;
  const auto [row_block, first, end] = args.spans.at(blockIdx.x);
  const RowRange rows = args.blocks.template at_together<Shape::kRows>(row_block, row_block);
  // Two neighbouring tiles at once where they have at most half of their rows.
  const bool takes_pairs =
      kScaling == MOIRE_SCALING_FP8_BLOCK && !kIsSummed<Source> && rows.size() <= Shape::kRows / 2;
  const auto part = [&](uint32_t i, bool is_pair = false) {
    return TilePart<kScaling>(row_block, rows, static_cast<int>(i) * Shape::kColumns,
                              args.source.columns, is_pair);
  };
  if (rows.size() == 0) return zero_span(args, first, end, part);
  const auto tiles_at = [&](uint32_t i) { return takes_pairs && i + 1 < end ? 2U : 1U; };
  const auto part_at = [&](uint32_t i) { return part(i, tiles_at(i) == 2); };
  const auto ask = [&](uint32_t i) {
    if constexpr (kAsksAhead<kScaling, Source>) {
      if (i < end) args.source.ask(part_at(i), reporter);
      __pipeline_commit();
    }
  };
  ask(first);
  for (uint32_t i = first, next; i < end; i = next) {
    next = i + tiles_at(i);
    const TilePart<kScaling> tile = part_at(i);
    Rows<kScaling, Source> values;
    if constexpr (kAsksAhead<kScaling, Source>) {
      __pipeline_wait_prior(0);
      args.source.take(tile, values);
      ask(next);
    } else {
      args.source.load(tile, reporter, values);
    }
    quantize_values(args, tile, values, reporter, notes);
  }
  if (args.zeroes_tail) zero_tail(args, part(first));
}

// Tiles of a source in shared memory: of FP32 some GPUs hold no second one.
template <class Source>
constexpr uint32_t kPlaces = sizeof(typename Source::Element) == sizeof(float) ? 1 : 2;

// Whether a copy of such rows may lie transposed: quantize_weight makes none that does.
template <class Source>
constexpr bool kMayTranspose = !requires(Source source) {
  source.matrices;
};

// The copies of a span's tiles, of which columns lie transposed. Tiles alternate between places in
// shared memory, so that a block meets once for each (twice where columns are summed, too, or there
// is one place); rows that are read by vectors come meanwhile.
template <int kScaling, class Source>
__device__ inline void quantize_span_transposing(const QuantizeTiles<Source>& args,
                                                 const Reporter& reporter,
                                                 const NonFiniteReporter& notes) {
  using Shape = TileShape<kScaling>;
  const auto [row_block, first, end] = args.spans.at(blockIdx.x);
  const RowRange rows = args.blocks.template at_together<Shape::kRows>(row_block, row_block);
  const auto part = [&](uint32_t i) {
    return TilePart<kScaling>(row_block, rows, static_cast<int>(i) * Shape::kColumns,
                              args.source.columns);
  };
  if (rows.size() == 0) return zero_span(args, first, end, part);
  auto* const memory = dynamic_shared<SharedTile<typename Source::Element>>();
  const auto fetch = [&](uint32_t i) {
    if (i == end) return;
    const TilePart<kScaling> tile = part(i);
    auto& shared = memory[(i - first) % kPlaces<Source>];
    args.source.fetch(
        tile, reporter, [&](int row) -> auto& { return shared.at(tile, row); });
    __pipeline_commit();
  };
  fetch(first);
#pragma unroll 1
  for (uint32_t i = first; i < end; ++i) {
    const TilePart<kScaling> tile = part(i), columns = part_of_columns(tile, args.source.columns);
    auto& shared = memory[(i - first) % kPlaces<Source>];
    Rows<kScaling, Source> values;
    __pipeline_wait_prior(0);  // for this thread's part
    shared.get(tile, values);
    if constexpr (kIsSummed<Source>) put_runs(args, tile, values);
    // What is infinite or NaN is found in the columns.
    if (args.rowwise.is_present()) quantize_rows<Way::kQuick>(args, tile, values);
    __syncthreads();
    if constexpr (kPlaces<Source> == 2) fetch(i + 1);
    if constexpr (kIsSummed<Source>) args.source.add_runs(tile);
    shared.get(columns, values);
    if constexpr (kPlaces<Source> == 1) {
      __syncthreads();  // all columns have been read
      fetch(i + 1);
    }
    const uint32_t met = quantize_transposed(args, columns, values);
    if (met == kIsOdd) note_first(args, columns, reporter, notes);
    // Runs have been read.
    if constexpr (kIsSummed<Source> && kPlaces<Source> == 2) __syncthreads();
  }
  if (args.zeroes_tail) zero_tail(args, part(first));
}

// kTransposes: the columnwise copy lies transposed.
template <int kScaling, class Source, bool kTransposes>
__global__ void __launch_bounds__(TileShape<kScaling>::kThreads,
                                  kBlocksPerMultiprocessor<kScaling, Source>)
    quantize_kernel(const __grid_constant__ QuantizeTiles<Source> args,
                    const __grid_constant__ Reporter reporter,
                    const __grid_constant__ NonFiniteReporter notes) {
  using Shape = TileShape<kScaling>;
  if (blockIdx.x == 0) check_groups(args.blocks.groups, reporter, threadIdx.x, Shape::kThreads);
  if constexpr (kTransposes) {
    quantize_span_transposing<kScaling>(args, reporter, notes);
  } else if constexpr (kHasLongLines<kScaling>) {
    quantize_span<kScaling>(args, reporter, notes);
  } else {
    const TilePart<kScaling> tile(args.blocks, args.column_tiles, args.source.columns);
    if (args.zeroes_tail) zero_tail(args, tile);
    if (tile.is_empty) return;
    Rows<kScaling, Source> values;
    args.source.load(tile, reporter, values);
    quantize_values(args, tile, values, reporter, notes);
  }
}

inline CopyTarget copy_target(const moire_quantized& q) {
  if (!is_present(q)) return {};
  const TensorView data(q.data), scales(q.scales);
  return {.data = static_cast<uint8_t*>(data.data),
          .stride = data.stride() * dtype_size(data.type()),
          .scales = scales.is_present() ? scales.data : nullptr,
          .scale_stride = scales.stride(),
          .scale_step = 1,
          .scale_rows = scales.num_rows(),
          .is_e5m2 = data.type() == DType::kE5M2,
          .has_e8m0_scales = scales.type() == DType::kE8M0};
}

// The tiles' copies, which the args of an op name, of a source with such blocks. FP8 tensor cores
// may read them (core/scale_shapes.h): rows then have their scales turned over, columns lie
// transposed.
template <class Source>
void set_copies(QuantizeTiles<Source>& tiles, const auto& args, const ScaleBlocks& blocks) {
  tiles.blocks = blocks;
  tiles.rowwise = copy_target(args.rowwise);
  tiles.columnwise = copy_target(args.columnwise);
  if (tiles.rowwise.is_present() &&
      has_turned_scales(args.rowwise.data, args.rowwise.scales, blocks.groups)) {
    std::swap(tiles.rowwise.scale_stride, tiles.rowwise.scale_step);
  }
  tiles.columnwise.is_transposed =
      tiles.columnwise.is_present() &&
      is_transposed(args.columnwise.data, args.columnwise.scales, blocks.groups);
  tiles.has_fractional_scales = args.fractional_scales == 1;
  if constexpr (requires { args.tail; }) tiles.zeroes_tail = args.tail == MOIRE_TAIL_ZERO;
}

// Calls f.operator()<kScaling>() with that of ragged copies.
template <class F>
void with_ragged_scaling(const QuantizeArgs& args, F&& f) {
  if (args.scaling == MOIRE_SCALING_MXFP8) return f.template operator()<MOIRE_SCALING_MXFP8>();
  if (args.fractional_scales == kFoldedScales) return f.template operator()<kFoldedMx>();
  f.template operator()<MOIRE_SCALING_FP8_BLOCK>();
}

// One launch over all tiles. `shape` is that of the copies.
template <int kScaling, class Source>
void launch_quantize(Launcher& launcher, QuantizeTiles<Source> args, const TensorView& shape,
                     const NonFiniteReporter& notes) {
  using Tile = TileShape<kScaling>;
  const auto kernel = quantize_kernel<kScaling, Source, false>;
  args.capacity = shape.num_rows();
  if constexpr (!kHasLongLines<kScaling>) {
    launch_tiles<Tile>(launcher, kernel, args, notes);
  } else {
    constexpr int kMostTiles = 4, kBlocks = kBlocksPerMultiprocessor<kScaling, Source>;
    if constexpr (kMayTranspose<Source>) {
      constexpr size_t kBytes = kPlaces<Source> * sizeof(SharedTile<typename Source::Element>);
      const auto transposing = quantize_kernel<kScaling, Source, true>;
      if (args.columnwise.is_transposed) {
        return launch_spans<Tile>(launcher, transposing, args, {kMostTiles, kBlocks, kBytes},
                                  notes);
      }
    }
    constexpr size_t kBytes = kAsksAhead<kScaling, Source> ? Source::kAskedBytes : 0;
    launch_spans<Tile>(launcher, kernel, args, {kMostTiles, kBlocks, kBytes}, notes);
  }
}

}  // namespace moire::cuda::ops
