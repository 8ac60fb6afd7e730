// dequantize on CUDA: the tiles of quantize_tiles.cuh, decoded as they are read and stored.
#include <algorithm>

#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/quantize.h"
#include "backend/cuda/ops/quantize_kernel.cuh"

namespace moire::cuda::ops {
namespace {

template <class T, bool kVectors>
struct DequantizeTiles {
  CodeRows<kVectors> source;
  ScaleBlocks blocks;
  Matrix<T> target;
  int64_t capacity;
  uint32_t column_tiles;
  bool zeroes_tail;
};

template <int kScaling, class T, bool kVectors>
__global__ void __launch_bounds__(TileShape<kScaling>::kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeTiles<T, kVectors> args,
                      const __grid_constant__ Reporter reporter) {
  using Shape = TileShape<kScaling>;
  if (blockIdx.x == 0) check_groups(args.blocks.groups, reporter, threadIdx.x, Shape::kThreads);
  const TilePart<kScaling> tile(args.blocks, args.column_tiles);
  const int64_t columns = args.source.columns;
  if (args.zeroes_tail) {
    zero_bytes(reinterpret_cast<uint8_t*>(args.target.data),
               args.target.stride * static_cast<int64_t>(sizeof(T)),
               columns * static_cast<int64_t>(sizeof(T)), rows_in_use(args.blocks.groups),
               args.capacity);
  }
  if (tile.rows.size() == 0 || tile.column >= columns) return;
  const auto part = args.source.part(tile);
#pragma unroll 4
  for (int i = 0; i < Shape::kRowsPerThread; ++i) {
    const int64_t row = tile.row(i);
    if (row >= tile.rows.end) return;
    const Eight<float> values = args.source.load(tile, part, row, tile.column, reporter);
    T* to = args.target.row(row) + tile.column;
    if constexpr (kVectors) {
      Packed<T, kEight> packed;
#pragma unroll
      for (int j = 0; j < kEight; ++j) packed.set(j, values[j]);
      store(to, packed);
    } else {
#pragma unroll
      for (int j = 0; j < kEight; ++j) {
        if (tile.column + j < columns) to[j] = from_float<T>(values[j]);
      }
    }
  }
}

bool takes_vectors(const DequantizeArgs& args) {
  return TensorView(args.source.data).columns() % kEight == 0 && opens_eights({args.source.data}) &&
         opens_vectors({args.target});
}

// A tile is the same in both directions.
int32_t direction_of(const DequantizeArgs& args) {
  return args.scaling == MOIRE_SCALING_FP8_TILE ? MOIRE_ROWWISE : args.direction;
}

template <int kScaling, class T, bool kVectors>
void launch(Launcher& launcher, const DequantizeArgs& args) {
  using Tile = TileShape<kScaling>;
  const TensorView data(args.source.data);
  const bool shares_rows = kScaling == MOIRE_SCALING_FP8_TILE || args.direction == MOIRE_COLUMNWISE;
  DequantizeTiles<T, kVectors> tiles{};
  tiles.source = code_rows<kVectors>(args.source, direction_of(args));
  tiles.blocks = scale_blocks(data, args.groups, args.scaling, shares_rows);
  tiles.target = matrix_of<T>(args.target);
  tiles.capacity = data.num_rows();
  tiles.zeroes_tail = args.tail == MOIRE_TAIL_ZERO && data.rank == 2;
  const int64_t column_tiles = ceil_div(data.columns(), Tile::kColumns);
  tiles.column_tiles = static_cast<uint32_t>(column_tiles);
  const int64_t row_blocks = std::max<int64_t>(1, tiles.blocks.count(Tile::kRows));
  launcher.launch(dequantize_kernel<kScaling, T, kVectors>,
                  {blocks_for(row_blocks * column_tiles, 1), Tile::kThreads}, tiles,
                  launcher.reporter());
}

template <int kScaling>
void launch(Launcher& launcher, const DequantizeArgs& args) {
  with_float_type(TensorView(args.target).type(), [&]<class T>() {
    if (takes_vectors(args)) {
      launch<kScaling, T, true>(launcher, args);
    } else {
      launch<kScaling, T, false>(launcher, args);
    }
  });
}

Status run(const Context& context, const DequantizeArgs& args) {
  Launcher launcher(context, "dequantize");
  if (args.scaling == MOIRE_SCALING_MXFP8) {
    launch<MOIRE_SCALING_MXFP8>(launcher, args);
  } else if (args.scaling == MOIRE_SCALING_FP8_BLOCK) {
    launch<MOIRE_SCALING_FP8_BLOCK>(launcher, args);
  } else {
    launch<MOIRE_SCALING_FP8_TILE>(launcher, args);
  }
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
