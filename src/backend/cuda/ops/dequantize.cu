// dequantize on CUDA: the tiles of quantize_tiles.cuh, decoded as they are read and stored.
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/code_words.cuh"
#include "backend/cuda/ops/quantize.h"

namespace moire::cuda::ops {
namespace {

// Whether rows have a scale in common.
template <int kScaling, int kDirection>
inline constexpr bool kSharesRows =
    kScaling == MOIRE_SCALING_FP8_TILE || kDirection == MOIRE_COLUMNWISE;

template <int kScaling, int kDirection>
using DequantizeTile = WordTile<
    kScaling,
    std::conditional_t<kSharesRows<kScaling, kDirection> && !Scales<kScaling>::kIsMx,
                       TileSizes<256, 256, 128, 128, kFour>, TileSizes<256, 128, 32, 128, kFour>>>;

template <class T, class Source>
struct DequantizeTiles {
  Source source;
  ScaleBlocks blocks;
  Matrix<T> target;
  int64_t capacity;
  uint32_t column_tiles;
  bool zeroes_tail;
};

template <bool kVectors, class T>
__device__ inline void store_floats(T* to, int columns_left, const float (&values)[kFour]) {
  if constexpr (kVectors) {
    Packed<T, kFour> packed;
#pragma unroll
    for (int j = 0; j < kFour; ++j) packed.set(j, values[j]);
    store(to, packed);
  } else {
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      if (j < columns_left) to[j] = from_float<T>(values[j]);
    }
  }
}

template <class T, class Source>
__global__ void __launch_bounds__(Source::Tile::kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeTiles<T, Source> args,
                      const __grid_constant__ Reporter reporter) {
  using Tile = typename Source::Tile;
  if (blockIdx.x == 0) check_groups(args.blocks.groups, reporter, threadIdx.x, Tile::kThreads);
  const PartOf<Tile> part(args.blocks, args.column_tiles, args.source.columns);
  const int64_t in_use = rows_in_use(args.blocks.groups);
  if (args.zeroes_tail && in_use < args.capacity) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    zero_bytes(reinterpret_cast<uint8_t*>(args.target.data), args.target.stride * kSize,
               args.source.columns * kSize, in_use, args.capacity);
  }
  if (part.is_empty) return;
  typename Source::Words words;
  args.source.load(part, words);
  T* const first = args.target.row(part.row(0)) + part.column;
  with_flag(args.source.is_e5m2, [&](auto is_e5m2) {
    T* p = first;
    words.for_each_row(is_e5m2, [&](int i, const float(&values)[kFour]) {
      const int left = args.source.columns - part.column;
      if (part.has_row(i)) store_floats<Source::kVectors>(p, left, values);
      p += args.target.stride;
    });
  });
}

bool takes_vectors(const DequantizeArgs& args) {
  return opens_words(args.source, args.direction) && opens_vectors({args.target});
}

template <int kScaling, int kDirection, class T, bool kVectors>
void launch(Launcher& launcher, const DequantizeArgs& args) {
  using Tile = DequantizeTile<kScaling, kDirection>;
  using Source = WordRows<Tile, kDirection == MOIRE_COLUMNWISE, kVectors>;
  DequantizeTiles<T, Source> tiles{};
  set_source(tiles, args, kSharesRows<kScaling, kDirection>);
  tiles.target = matrix_of<T>(args.target);
  launch_tiles<Tile>(launcher, dequantize_kernel<T, Source>, tiles);
}

// with_blocks() of tiles too, which are the same in both directions, rowwise here.
template <class F>
decltype(auto) with_scaling(const DequantizeArgs& args, F&& f) {
  if (args.scaling == MOIRE_SCALING_FP8_TILE) {
    return f.template operator()<MOIRE_SCALING_FP8_TILE, MOIRE_ROWWISE>();
  }
  return with_blocks(args.scaling, args.direction, f);
}

Status run(const Context& context, const DequantizeArgs& args) {
  Launcher launcher(context, "dequantize");
  with_scaling(args, [&]<int kScaling, int kDirection>() {
    with_float_type(TensorView(args.target).type(), [&]<class T>() {
      (takes_vectors(args) ? launch<kScaling, kDirection, T, true>
                           : launch<kScaling, kDirection, T, false>)(launcher, args);
    });
  });
  return launcher.status();
}

std::string policy(const DeviceState&, const DequantizeArgs& args) {
  return with_scaling(args, [&]<int kScaling, int kDirection>() {
    using Tile = DequantizeTile<kScaling, kDirection>;
    return tiles_policy(Tile::kRows, Tile::kColumns, "four", takes_vectors(args));
  });
}

}  // namespace

const Implementation<DequantizeArgs> kDequantize = on_cuda(supports_words, policy, run);

}  // namespace moire::cuda::ops
