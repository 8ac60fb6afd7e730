// A block of threads has a tile of 128 x 128: it reads it once, and meets once for its largest
// magnitude, of which the tile's scale is made. Rows are quantised from registers, what is turned
// over from shared memory, where each warp reads eight columns (quantize_transposed.cuh). MXFP8 is
// folded as it is made: a row's or a column's blocks of 32 have their codes from their own lanes.
#include "backend/cuda/ops/core_weights.h"
#include "backend/cuda/ops/quantize.h"
#include "backend/cuda/ops/quantize_kernel.cuh"

namespace moire::cuda::ops {
namespace {

template <bool kFolds>
constexpr int kScalingOf = kFolds ? kFoldedMx : MOIRE_SCALING_FP8_BLOCK;

// The largest bits of all of a block's threads, which call it together, once for each `memory`.
__device__ inline uint32_t largest_of_block(uint32_t bits,
                                            uint32_t (&memory)[kLongThreads / kWarp]) {
  const uint32_t of_warp = __reduce_max_sync(kAllLanes, bits);
  if (threadIdx.x % kWarp == 0) memory[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  uint32_t most = 0;
#pragma unroll
  for (const uint32_t other : memory) most = max(most, other);
  return most;
}

// The scale of a tile with this largest magnitude, and what its elements are multiplied by.
template <bool kFolds>
struct TileScale;
template <>
struct TileScale<false> {
  StoredScale<float> made;

  __device__ TileScale(float amax, bool is_fractional)
      : made(block_scale_of(amax, false, is_fractional)) {}
  __device__ float stored() const { return made.scale; }
  // Of a lane's own row or column, by the largest magnitude of its block.
  __device__ float multiplier(float) const { return made.multiplier; }
};
template <>
struct TileScale<true> {
  uint32_t code;
  float scale;

  __device__ TileScale(float amax, bool)
      : code(mx_scale_of(amax, false).scale),
        scale(fold_scale(static_cast<uint8_t>(code), has_nonzero(amax, false))) {}
  __device__ float stored() const { return scale; }
  __device__ FoldedMultiplier multiplier(float amax) const {
    return FoldedMultiplier::of(mx_scale_of(amax, false).scale, code, false);
  }
};

// A tile's scale in both copies: of rows where the tile lies, of what is turned over the other way.
template <class Source>
__device__ inline void store_scale(const QuantizeTiles<Source>& args, uint32_t row_block,
                                   uint32_t column_tile, float scale) {
  const uint32_t per_matrix = args.source.blocks_per_matrix, matrix = row_block / per_matrix;
  const auto store = [&](const CopyTarget& to, uint32_t row, uint32_t column) {
    if (to.is_present()) static_cast<float*>(to.scales)[row * to.scale_stride + column] = scale;
  };
  store(args.rowwise, row_block, column_tile);
  store(args.columnwise, matrix * args.column_tiles + column_tile, row_block % per_matrix);
}

// The tile turned over, from shared memory, where it lies.
template <bool kFolds, bool kSkipsNan, class Source, int kScaling = kScalingOf<kFolds>>
__device__ inline void store_turned(const QuantizeTiles<Source>& args,
                                    const TilePart<kScaling>& tile, const TileScale<kFolds>& scale,
                                    SharedTile<typename Source::Element>& shared) {
  const TilePart<kScaling> part = part_of_columns(tile, args.source.columns);
  Rows<kScaling, Source> values;
  shared.get(part, values);
  MultiplierOf<kScaling> multipliers[kEight];
  float amax = 0;
  if constexpr (kFolds) amax = largest_of_own_column<kSkipsNan, kScaling>(values);
  const MultiplierOf<kScaling> own = scale.multiplier(amax);
#pragma unroll
  for (int j = 0; j < kEight; ++j) multipliers[j] = kFolds ? of_lane<kEight>(own, j) : own;
  const CopyTarget& to = args.columnwise;
  const uint32_t per_matrix = args.source.blocks_per_matrix, matrix = part.index / per_matrix;
  const int64_t column = int64_t{matrix} * args.source.columns + part.column;
  uint8_t* const first =
      to.data + column * to.stride + int64_t{part.index % per_matrix} * 128 + part.first_row;
  store_columns(args, part, first, values, [&](int j) { return multipliers[j]; });
}

// The copies of a tile, of which `own` is the largest magnitude of this lane's row.
template <bool kFolds, bool kSkipsNan, class Source, int kScaling = kScalingOf<kFolds>>
__device__ inline void store_tile(const QuantizeTiles<Source>& args, const TilePart<kScaling>& tile,
                                  const Rows<kScaling, Source>& values, float own, float amax,
                                  SharedTile<typename Source::Element>& shared) {
  const TileScale<kFolds> scale(amax, args.is_fractional());
  if (threadIdx.x == 0) {
    store_scale(args, tile.index, static_cast<uint32_t>(tile.first_column) / 128, scale.stored());
  }
  if (args.rowwise.is_present()) {
    const MultiplierOf<kScaling> of_own = scale.multiplier(own);
    MultiplierOf<kScaling> multipliers[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) multipliers[i] = kFolds ? of_lane<4>(of_own, i) : of_own;
    store_rows<Way::kQuick>(args, tile, args.rowwise, values,
                            [&](int i, int) { return multipliers[i]; });
  }
  if (args.columnwise.is_present()) store_turned<kFolds, kSkipsNan>(args, tile, scale, shared);
}

// All that is to be done of a tile with an element that is infinite or NaN, which is read again:
// only few are.
template <bool kFolds, class Source, int kScaling = kScalingOf<kFolds>>
__device__ __noinline__ void store_odd_tile(const QuantizeTiles<Source>& args,
                                            const TilePart<kScaling> tile, const Reporter& reporter,
                                            const NonFiniteReporter& notes,
                                            SharedTile<typename Source::Element>& shared) {
  __shared__ uint32_t most[kLongThreads / kWarp];
  note_first(args, tile, reporter, notes);
  Rows<kScaling, Source> values;
  args.source.load(tile, reporter, values);
  const float own = largest_of_own_row<true, TileShape<kScaling>::kBlockLanes>(values);
  const uint32_t bits = largest_of_block(bit_cast<uint32_t>(own), most);
  store_tile<kFolds, true>(args, tile, values, own, bit_cast<float>(bits), shared);
}

// Blocks that a multiprocessor holds: what waits for loads is hidden by the others. Rows of 16 bits
// leave registers for a third (docs/kernels/cuda_ops.md); those of FP32 would spill.
template <class T>
constexpr int kBlocks = sizeof(T) == 2 ? 3 : 2;

template <bool kFolds, class Source>
__global__ void __launch_bounds__(kLongThreads, kBlocks<typename Source::Element>)
    core_weights_kernel(const __grid_constant__ QuantizeTiles<Source> args,
                        const __grid_constant__ Reporter reporter,
                        const __grid_constant__ NonFiniteReporter notes) {
  constexpr int kScaling = kScalingOf<kFolds>;
  __shared__ uint32_t most[kLongThreads / kWarp];
  auto& shared = *dynamic_shared<SharedTile<typename Source::Element>>();
  const uint32_t row_block = blockIdx.x / args.column_tiles;
  const uint32_t column_tile = blockIdx.x - row_block * args.column_tiles;
  const TilePart<kScaling> tile(row_block, args.blocks.template at<128>(row_block),
                                static_cast<int>(column_tile) * 128, args.source.columns);
  Rows<kScaling, Source> values;
  args.source.load(tile, reporter, values);
  if (args.columnwise.is_present()) shared.put(tile, values);
  const float own = largest_of_own_row<false, TileShape<kScaling>::kBlockLanes>(values);
  const uint32_t bits = largest_of_block(bit_cast<uint32_t>(own), most);  // then the tile is there
  if (bits >= kInfinityBits) return store_odd_tile<kFolds>(args, tile, reporter, notes, shared);
  store_tile<kFolds, false>(args, tile, values, own, bit_cast<float>(bits), shared);
}

// All matrices of a weight, packed or not, as a list.
template <bool kFolds, class T, bool kVectors>
void launch(Launcher& launcher, const Weight& weight, const WeightCopies& made,
            int32_t fractional_scales, const NonFiniteReporter& notes) {
  using Source = ListedRows<T, kVectors>;
  const TensorView source(weight.tensor);
  const int64_t rows = source.shape[1], columns = source.columns();
  const int64_t row_blocks = ceil_div(rows, 128), column_tiles = ceil_div(columns, 128);
  QuantizeTiles<Source> tiles{};
  tiles.source.rows = matrix_of<const T>(source);
  tiles.source.columns = static_cast<int>(columns);
  tiles.source.blocks_per_matrix = static_cast<uint32_t>(row_blocks);
  tiles.rowwise = copy_target(made.rowwise);
  tiles.columnwise = copy_target(made.columnwise);
  tiles.column_tiles = static_cast<uint32_t>(column_tiles);
  tiles.has_fractional_scales = fractional_scales == 1;
  const size_t shared_bytes = tiles.columnwise.is_present() ? sizeof(SharedTile<T>) : 0;
  for (int64_t first = 0; first < source.shape[0]; first += Source::kMost) {
    const TensorView some = tiles.source.take(weight, first);
    tiles.blocks = scale_blocks(some, {}, MOIRE_SCALING_FP8_TILE, true);
    launcher.launch(
        core_weights_kernel<kFolds, Source>,
        {blocks_for(some.shape[0] * row_blocks * column_tiles, 1), kLongThreads, shared_bytes},
        tiles, launcher.reporter(), notes);
    tiles.rowwise.skip(some.shape[0] * rows, some.shape[0] * row_blocks, DType::kFP32);
    tiles.columnwise.skip(some.shape[0] * columns, some.shape[0] * column_tiles, DType::kFP32);
  }
}

}  // namespace

Status make_core_weights(const Context& context, const Weight& weight, int32_t recipe,
                         int32_t fractional_scales, const WeightCopies& made) {
  Launcher launcher(context, "prepare_weight");
  const TensorView source(weight.tensor);
  const auto notes = non_finite_reporter(context, {"prepare_weight", "w"}, source, false);
  with_floats(source.type(), opens_eights(weight), [&]<class T, bool kVectors>() {
    recipe == MOIRE_RECIPE_MXFP8_FAST
        ? launch<true, T, kVectors>(launcher, weight, made, fractional_scales, notes)
        : launch<false, T, kVectors>(launcher, weight, made, fractional_scales, notes);
  });
  return launcher.status();
}

int64_t launches_of_core_weights(const Weight& weight) {
  return ListedRows<float, false>::launches(weight.tensor.shape[0]);
}

}  // namespace moire::cuda::ops
