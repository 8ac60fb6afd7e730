// The kernel of quantize, quantize_weight and requantize: a block per tile (quantize_tiles.cuh),
// which it reads once and writes as one copy or both.
//
// Rowwise, the lanes that share a scale exchange their largest magnitudes. Columnwise, each thread
// has the largest of its rows, shared memory those of all warps, and a thread per column makes the
// scale. Where a magnitude is infinity's or NaN's, the maxima are taken again without NaN, and
// what was met is noted.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "backend/cuda/device/non_finite.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/ops/quantize_tiles.cuh"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {

// One quantised copy; absent where data is null.
struct CopyTarget {
  uint8_t* data;
  int64_t stride;
  void* scales;
  int64_t scale_stride;
  int64_t scale_rows;
  bool is_e5m2;

  __host__ __device__ bool is_present() const { return data != nullptr; }
};

template <class Source>
struct QuantizeTiles {
  Source source;
  ScaleBlocks blocks;
  CopyTarget rowwise, columnwise;  // FP8_TILE: rowwise alone
  int64_t capacity;                // rows of the copies
  uint32_t column_tiles;
  bool fractional, zeroes_tail;
};

constexpr uint32_t kAllLanes = 0xFFFFFFFFU;

// Eight values times what they are multiplied by, as codes.
template <bool kVectors, class T, class Multiplier>
__device__ inline void store_codes(const CopyTarget& to, int64_t row, int64_t column,
                                   int64_t columns, const Eight<T>& values,
                                   Multiplier&& multiplier) {
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes[i] = encode_pair(values[2 * i] * multiplier(2 * i),
                           values[2 * i + 1] * multiplier(2 * i + 1), to.is_e5m2);
  }
  uint8_t* p = to.data + row * to.stride + column;
  if constexpr (kVectors) {
    *reinterpret_cast<uint2*>(p) = {codes[0] | codes[1] << 16, codes[2] | codes[3] << 16};
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (column + i < columns) p[i] = static_cast<uint8_t>(codes[i / 2] >> (8 * (i % 2)));
    }
  }
}

// The first of this warp's elements that is infinite or NaN, noted. They are read again: nobody
// waits for it where all is finite.
template <int kScaling, class Source>
__device__ __noinline__ void note_first(const QuantizeTiles<Source>& args,
                                        const TilePart<kScaling> tile, const Reporter& reporter,
                                        const NonFiniteReporter& notes) {
  using Shape = TileShape<kScaling>;
  const auto part = args.source.part(tile);
  uint32_t first = ~0U;  // counted along the tile's rows
  for (int i = 0; i < Shape::kRowsPerThread; ++i) {
    const int64_t row = tile.row(i);
    if (row >= tile.rows.end) break;
    const auto values = args.source.load(tile, part, row, tile.column, reporter);
    for (int j = kEight - 1; j >= 0; --j) {
      if ((bit_cast<uint32_t>(values[j]) & 0x7FFFFFFFU) < kInfinityBits) continue;
      first = min(first, static_cast<uint32_t>(row - tile.rows.begin) * Shape::kColumns +
                             static_cast<uint32_t>(tile.column - tile.first_column) + j);
    }
  }
  const uint32_t of_warp = __reduce_min_sync(kAllLanes, first);
  if (of_warp == ~0U || threadIdx.x % kWarp != 0) return;
  const int64_t row = tile.rows.begin + of_warp / Shape::kColumns;
  note_non_finite(notes, row, tile.first_column + of_warp % Shape::kColumns,
                  args.source.named_row(row, reporter));
}

// A thread's rows.
template <int kScaling, class Source>
using Rows = Eight<typename Source::Element>[TileShape<kScaling>::kRowsPerThread];

// The copy with scales along the rows; whether anything is infinite or NaN.
template <int kScaling, class Source>
__device__ inline bool quantize_rows(const QuantizeTiles<Source>& args,
                                     const TilePart<kScaling>& tile,
                                     const Rows<kScaling, Source>& values) {
  using Shape = TileShape<kScaling>;
  using S = Scales<kScaling>;
  const CopyTarget& to = args.rowwise;
  bool is_odd = false;
#pragma unroll
  for (int i = 0; i < Shape::kRowsPerThread; ++i) {
    const auto share = [](uint32_t amax) {
#pragma unroll
      for (int lanes = 1; lanes < Shape::kLanes; lanes *= 2) {
        amax = max(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
      }
      return amax;
    };
    uint32_t amax = share(largest_of<false>(values[i]));
    if (__any_sync(kAllLanes, amax >= kInfinityBits)) {
      is_odd = true;
      amax = share(largest_of<true>(values[i]));
    }
    const int64_t row = tile.row(i);
    if (row >= tile.rows.end || tile.column >= args.source.columns) continue;
    const bool is_first = threadIdx.x % Shape::kLanes == 0;
    auto* scales = static_cast<typename S::Stored*>(to.scales) + row * to.scale_stride +
                   tile.column / S::kBlock;
    const float multiplier =
        S::store(bit_cast<float>(amax), to.is_e5m2, args.fractional, is_first ? scales : nullptr);
    store_codes<Source::kVectors>(to, row, tile.column, args.source.columns, values[i],
                                  [&](int) { return multiplier; });
  }
  return is_odd;
}

// Largest magnitudes of eight columns, packed as their elements are.
template <bool kSkipsNan, class T, int kRows>
__device__ inline Eight<T> largest_of_columns(const Eight<T> (&values)[kRows]) {
  using M = Magnitudes<T>;
  Eight<T> most{};
#pragma unroll
  for (const Eight<T>& row : values) {
#pragma unroll
    for (int i = 0; i < Eight<T>::kWords; ++i) {
      most.words[i] = M::template larger<kSkipsNan>(most.words[i], M::of(row.words[i]));
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

// The largest magnitudes of all columns of the tile, those of thread t's column t returned.
template <bool kSkipsNan, int kScaling, class T, int kRows>
__device__ inline float share_columns(const Eight<T> (&values)[kRows],
                                      ColumnMemory<kScaling, T>& memory) {
  using Shape = TileShape<kScaling>;
  using M = Magnitudes<T>;
  Eight<T> most = largest_of_columns<kSkipsNan>(values);
#pragma unroll
  for (int lanes = Shape::kPieces; lanes < kWarp; lanes *= 2) {
#pragma unroll
    for (uint32_t& word : most.words) {
      word = M::template larger<kSkipsNan>(word, __shfl_xor_sync(kAllLanes, word, lanes));
    }
  }
  if (threadIdx.x % kWarp < Shape::kPieces) {
    auto* to = &memory.most[threadIdx.x / kWarp][threadIdx.x % Shape::kPieces * kEight];
    *reinterpret_cast<Eight<T>*>(to) = most;
  }
  __syncthreads();
  float amax = 0;
  if (threadIdx.x < Shape::kColumns) {
    typename M::Bits bits = 0;
#pragma unroll
    for (const auto& of_warp : memory.most) bits = max(bits, of_warp[threadIdx.x]);
    amax = M::to_float(bits);
  }
  return amax;
}

// The copy with scales down the columns; whether anything is infinite or NaN.
template <int kScaling, class Source>
__device__ inline bool quantize_columns(const QuantizeTiles<Source>& args,
                                        const TilePart<kScaling>& tile,
                                        const Rows<kScaling, Source>& values) {
  using Shape = TileShape<kScaling>;
  using S = Scales<kScaling>;
  using T = typename Source::Element;
  __shared__ ColumnMemory<kScaling, T> memory;
  const CopyTarget& to = args.columnwise;
  float amax = share_columns<false, kScaling>(values, memory);
  const bool is_odd = __syncthreads_or(bit_cast<uint32_t>(amax) >= kInfinityBits) != 0;
  if (is_odd) amax = share_columns<true, kScaling>(values, memory);
  if (threadIdx.x < Shape::kColumns) {
    const int64_t column = tile.first_column + threadIdx.x;
    auto* scale =
        static_cast<typename S::Stored*>(to.scales) + tile.index * to.scale_stride + column;
    memory.multipliers[threadIdx.x] =
        S::store(amax, to.is_e5m2, args.fractional, column < args.source.columns ? scale : nullptr);
  }
  __syncthreads();
  if (tile.column >= args.source.columns) return is_odd;
  float multipliers[kEight];
  const int first = threadIdx.x % Shape::kPieces * kEight;
#pragma unroll
  for (int i = 0; i < kEight; ++i) multipliers[i] = memory.multipliers[first + i];
#pragma unroll
  for (int i = 0; i < Shape::kRowsPerThread; ++i) {
    if (tile.row(i) >= tile.rows.end) continue;
    store_codes<Source::kVectors>(to, tile.row(i), tile.column, args.source.columns, values[i],
                                  [&](int j) { return multipliers[j]; });
  }
  return is_odd;
}

// The tile with one scale; whether anything is infinite or NaN.
template <int kScaling, class Source>
__device__ inline bool quantize_tile(const QuantizeTiles<Source>& args,
                                     const TilePart<kScaling>& tile,
                                     const Rows<kScaling, Source>& values) {
  using Shape = TileShape<kScaling>;
  using S = Scales<kScaling>;
  using T = typename Source::Element;
  __shared__ uint32_t most[2][Shape::kThreads / kWarp];
  const CopyTarget& to = args.rowwise;
  const auto share = [&](const Eight<T>& of_thread, int which) {
    const uint32_t of_warp = __reduce_max_sync(kAllLanes, largest_of<false>(of_thread));
    if (threadIdx.x % kWarp == 0) most[which][threadIdx.x / kWarp] = of_warp;
    __syncthreads();
    uint32_t amax = 0;
#pragma unroll
    for (const uint32_t of : most[which]) amax = max(amax, of);
    return amax;
  };
  uint32_t amax = share(largest_of_columns<false>(values), 0);
  const bool is_odd = amax >= kInfinityBits;  // of all threads alike
  if (is_odd) amax = share(largest_of_columns<true>(values), 1);
  auto* scale = static_cast<typename S::Stored*>(to.scales) + tile.index * to.scale_stride +
                tile.first_column / S::kBlock;
  const float multiplier = S::store(bit_cast<float>(amax), to.is_e5m2, args.fractional,
                                    threadIdx.x == 0 ? scale : nullptr);
  if (tile.column >= args.source.columns) return is_odd;
#pragma unroll
  for (int i = 0; i < Shape::kRowsPerThread; ++i) {
    if (tile.row(i) >= tile.rows.end) continue;
    store_codes<Source::kVectors>(to, tile.row(i), tile.column, args.source.columns, values[i],
                                  [&](int) { return multiplier; });
  }
  return is_odd;
}

// Rows past the last group, and columnwise scales that no block owns.
template <int kScaling, class Source>
__device__ inline void zero_tail(const QuantizeTiles<Source>& args,
                                 const TilePart<kScaling>& tile) {
  using S = Scales<kScaling>;
  constexpr int64_t kScaleBytes = sizeof(typename S::Stored);
  const int64_t in_use = rows_in_use(args.blocks.groups), columns = args.source.columns;
  for (const CopyTarget* copy : {&args.rowwise, &args.columnwise}) {
    if (copy->is_present()) zero_bytes(copy->data, copy->stride, columns, in_use, args.capacity);
  }
  if (args.rowwise.is_present() && kScaling != MOIRE_SCALING_FP8_TILE) {
    zero_bytes(static_cast<uint8_t*>(args.rowwise.scales), args.rowwise.scale_stride * kScaleBytes,
               ceil_div(columns, S::kBlock) * kScaleBytes, in_use, args.capacity);
  }
  const int64_t column = tile.first_column + threadIdx.x;
  if (args.columnwise.is_present() && tile.rows.size() == 0 && column < columns &&
      threadIdx.x < TileShape<kScaling>::kColumns && tile.index < args.columnwise.scale_rows) {
    static_cast<typename S::Stored*>(
        args.columnwise.scales)[tile.index * args.columnwise.scale_stride + column] = 0;
  }
}

// Blocks that fit a multiprocessor by what a thread keeps.
template <int kScaling, class Source>
constexpr int kBlocksPerMultiprocessor = sizeof(Rows<kScaling, Source>) >= 256   ? 2
                                         : sizeof(Rows<kScaling, Source>) >= 128 ? 3
                                                                                 : 4;

template <int kScaling, class Source>
__global__ void __launch_bounds__(TileShape<kScaling>::kThreads,
                                  kBlocksPerMultiprocessor<kScaling, Source>)
    quantize_kernel(const __grid_constant__ QuantizeTiles<Source> args,
                    const __grid_constant__ Reporter reporter,
                    const __grid_constant__ NonFiniteReporter notes) {
  using Shape = TileShape<kScaling>;
  if (blockIdx.x == 0) check_groups(args.blocks.groups, reporter, threadIdx.x, Shape::kThreads);
  const TilePart<kScaling> tile(args.blocks, args.column_tiles);
  if (args.zeroes_tail) zero_tail(args, tile);
  if (tile.rows.size() == 0) return;
  const auto part = args.source.part(tile);
  Rows<kScaling, Source> values;
#pragma unroll
  for (int i = 0; i < Shape::kRowsPerThread; ++i) {
    const int64_t row = tile.row(i);
    values[i] = row < tile.rows.end ? args.source.load(tile, part, row, tile.column, reporter)
                                    : Eight<typename Source::Element>{};
  }
  bool is_odd = false;
  if constexpr (kScaling == MOIRE_SCALING_FP8_TILE) {
    is_odd = quantize_tile<kScaling>(args, tile, values);
  } else {
    if (args.rowwise.is_present()) is_odd = quantize_rows<kScaling>(args, tile, values);
    if (args.columnwise.is_present()) is_odd |= quantize_columns<kScaling>(args, tile, values);
  }
  if (__any_sync(kAllLanes, is_odd)) note_first(args, tile, reporter, notes);
}

inline CopyTarget copy_target(const moire_quantized& q) {
  if (!is_present(q)) return {};
  const TensorView data(q.data), scales(q.scales);
  return {static_cast<uint8_t*>(data.data),
          data.stride(),
          scales.data,
          scales.stride(),
          scales.num_rows(),
          data.type() == DType::kE5M2};
}

// Whether every row of these codes starts on 8 bytes; absent ones do.
inline bool opens_eights(std::initializer_list<TensorView> codes) {
  for (const TensorView& t : codes) {
    if (!t.is_present()) continue;
    const bool fits = t.num_rows() <= 1 || t.stride() % kEight == 0;
    if (reinterpret_cast<uintptr_t>(t.data) % kEight != 0 || !fits) return false;
  }
  return true;
}

// One launch over all tiles. `shape` is that of the copies.
template <int kScaling, class Source>
void launch_quantize(Launcher& launcher, QuantizeTiles<Source> args, const TensorView& shape,
                     const NonFiniteCall& call) {
  using Tile = TileShape<kScaling>;
  args.capacity = shape.num_rows();
  const int64_t column_tiles = ceil_div(shape.columns(), Tile::kColumns);
  args.column_tiles = static_cast<uint32_t>(column_tiles);
  // One at least, which zeroes the tail where there is nothing else.
  const int64_t row_blocks = std::max<int64_t>(1, args.blocks.count(Tile::kRows));
  const uint32_t blocks = blocks_for(row_blocks * column_tiles, 1);
  launcher.launch(quantize_kernel<kScaling, Source>, {blocks, Tile::kThreads}, args,
                  launcher.reporter(), launcher.non_finite_reporter(call));
}

}  // namespace moire::cuda::ops
