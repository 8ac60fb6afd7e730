// dequantize on CUDA: the tiles of quantize_tiles.cuh, decoded as they are read and stored.
#include <algorithm>

#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/quantize.h"
#include "backend/cuda/ops/quantize_kernel.cuh"

namespace moire::cuda::ops {
namespace {

// Whether rows have a scale in common.
template <int kScaling, int kDirection>
inline constexpr bool kSharesRows =
    kScaling == MOIRE_SCALING_FP8_TILE || kDirection == MOIRE_COLUMNWISE;

// Where scales are of 32 rows at most, lines of a row are a warp's whole and a thread has few rows,
// so that many threads' loads are under way: 0.97 of a copy instead of 0.93 by tiles of a warp.
template <int kScaling, int kDirection>
using DecodedTiles =
    std::conditional_t<kSharesRows<kScaling, kDirection> && !Scales<kScaling>::kIsMx,
                       TileShape<kScaling>, TileSizes<256, 256, 32, 256>>;

template <class T, class Source>
struct DequantizeTiles {
  Source source;
  ScaleBlocks blocks;
  Matrix<T> target;
  int64_t capacity;
  uint32_t column_tiles;
  bool zeroes_tail;
};

template <class T, class Source>
__device__ __noinline__ void zero_tail(const DequantizeTiles<T, Source>& args, int64_t in_use) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  zero_bytes(reinterpret_cast<uint8_t*>(args.target.data), args.target.stride * kSize,
             args.source.columns * kSize, in_use, args.capacity);
}

template <bool kVectors, class T>
__device__ inline void store_floats(T* to, int columns_left, const Eight<float>& values) {
  if constexpr (kVectors) {
    Packed<T, kEight> packed;
#pragma unroll
    for (int j = 0; j < kEight; ++j) packed.set(j, values[j]);
    store(to, packed);
  } else {
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
      if (j < columns_left) to[j] = from_float<T>(values[j]);
    }
  }
}

template <int kScaling, class Shape, class T, class Source>
__global__ void __launch_bounds__(Shape::kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeTiles<T, Source> args,
                      const __grid_constant__ Reporter reporter) {
  if (blockIdx.x == 0) check_groups(args.blocks.groups, reporter, threadIdx.x, Shape::kThreads);
  const TilePart<kScaling, Shape> tile(args.blocks, args.column_tiles, args.source.columns);
  const int64_t in_use = rows_in_use(args.blocks.groups);
  if (args.zeroes_tail && in_use < args.capacity) zero_tail(args, in_use);
  if (tile.num_rows == 0) return;
  typename Source::template Rows<tile.kRows> values;
  args.source.load(tile, reporter, values);
  T* p = args.target.row(tile.row(0)) + tile.column;
#pragma unroll
  for (int i = 0; i < tile.kRows; ++i, p += args.target.stride) {
    if (!tile.has_row(i)) continue;
    store_floats<Source::kVectors>(p, args.source.columns - tile.column, values[i]);
  }
}

bool takes_vectors(const DequantizeArgs& args) {
  return opens_eights(args.source, args.direction) && opens_vectors({args.target});
}

template <int kScaling, int kDirection, class T, bool kVectors>
void launch(Launcher& launcher, const DequantizeArgs& args) {
  using Tile = DecodedTiles<kScaling, kDirection>;
  const TensorView data(args.source.data);
  DequantizeTiles<T, CodeRows<kVectors, kDirection>> tiles{};
  tiles.source = code_rows<kVectors, kDirection>(args.source);
  tiles.blocks = scale_blocks(data, args.groups, args.scaling, kSharesRows<kScaling, kDirection>);
  tiles.target = matrix_of<T>(args.target);
  tiles.capacity = data.num_rows();
  tiles.zeroes_tail = args.tail == MOIRE_TAIL_ZERO && data.rank == 2;
  const int64_t column_tiles = ceil_div(data.columns(), Tile::kColumns);
  tiles.column_tiles = static_cast<uint32_t>(column_tiles);
  const int64_t row_blocks = std::max<int64_t>(1, tiles.blocks.count(Tile::kRows));
  launcher.launch(dequantize_kernel<kScaling, Tile, T, CodeRows<kVectors, kDirection>>,
                  {blocks_for(row_blocks * column_tiles, Tile::kTiles), Tile::kThreads}, tiles,
                  launcher.reporter());
}

// Calls f.operator()<kScaling, kDirection>(). A tile is the same in both directions, rowwise here.
template <class F>
void with_blocks(int32_t scaling, int32_t direction, F&& f) {
  const bool is_rowwise = direction == MOIRE_ROWWISE;
  if (scaling == MOIRE_SCALING_MXFP8) {
    is_rowwise ? f.template operator()<MOIRE_SCALING_MXFP8, MOIRE_ROWWISE>()
               : f.template operator()<MOIRE_SCALING_MXFP8, MOIRE_COLUMNWISE>();
  } else if (scaling == MOIRE_SCALING_FP8_BLOCK) {
    is_rowwise ? f.template operator()<MOIRE_SCALING_FP8_BLOCK, MOIRE_ROWWISE>()
               : f.template operator()<MOIRE_SCALING_FP8_BLOCK, MOIRE_COLUMNWISE>();
  } else {
    f.template operator()<MOIRE_SCALING_FP8_TILE, MOIRE_ROWWISE>();
  }
}

Status run(const Context& context, const DequantizeArgs& args) {
  Launcher launcher(context, "dequantize");
  with_blocks(args.scaling, args.direction, [&]<int kScaling, int kDirection>() {
    with_float_type(TensorView(args.target).type(), [&]<class T>() {
      (takes_vectors(args) ? launch<kScaling, kDirection, T, true>
                           : launch<kScaling, kDirection, T, false>)(launcher, args);
    });
  });
  return launcher.status();
}

Reason supports(const DeviceState&, const DequantizeArgs& args) {
  return too_wide("source", TensorView(args.source.data).columns());
}
std::string policy(const DeviceState&, const DequantizeArgs& args) {
  return tiles_policy(args.scaling, takes_vectors(args));
}

}  // namespace

const Implementation<DequantizeArgs> kDequantize = {
    "cuda", Device::kCuda, supports, no_workspace, policy, run,
};

}  // namespace moire::cuda::ops
