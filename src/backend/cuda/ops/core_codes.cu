// A block of threads works on a square of 128 x 128 codes. A thread has the words of four columns
// of 16 rows, four neighbouring ones of each of the square's blocks of 32: so it holds a part of
// each MXFP8 block that is folded.
#include "backend/cuda/device/transposed_tile.cuh"
#include "backend/cuda/ops/core_codes.h"
#include "backend/cuda/ops/quantize_tiles.cuh"
#include "core/format.h"
#include "core/prepared_weight.h"

namespace moire::cuda::ops {
namespace {

constexpr int kSide = 128, kThreads = 256;
constexpr int kBlocks = 4, kRows = 4;  // MXFP8 blocks of a side; neighbouring rows of a thread
using Transposed = TransposedTile<4>;

// What shares a folded code.
enum class Fold { kNone, kRow, kColumn, kTile };

struct Codes {
  Matrix<const uint8_t> source;
  Matrix<const uint8_t> source_scales;  // MXFP8
  Matrix<const float> source_tiles;     // of a weight that is transposed and not folded
  ScaleBlocks blocks;
  uint8_t* target;
  int64_t stride, matrix_stride;  // of the target
  Matrix<float> scales;
  uint32_t columns, column_tiles, blocks_per_matrix, scale_rows_per_matrix;
  bool is_e5m2, scales_are_rowwise;
};

// A square: the index of its rows among all blocks of 128, which they are, and the first MXFP8
// scale row of columnwise ones.
struct Square {
  uint32_t index, first_column;
  RowRange rows;
  int64_t first_scale_row;

  __device__ explicit Square(const Codes& args)
      : index(blockIdx.x / args.column_tiles),
        first_column(blockIdx.x % args.column_tiles * kSide) {
    if (args.blocks.kind == ScaleBlocks::kRagged) {
      const RowBlock block = row_block_at<kSide>(args.blocks.groups, index);
      const int64_t begin = rows_of(args.blocks.groups, block.group).begin;
      rows = {block.first, block.end};
      first_scale_row = begin / 32 + block.group + (block.first - begin) / 32;
    } else {
      rows = args.blocks.at<kSide>(index);
      first_scale_row = int64_t{index / args.blocks_per_matrix} * args.scale_rows_per_matrix +
                        index % args.blocks_per_matrix * int64_t{kBlocks};
    }
  }
  __device__ int64_t row(int block, int i) const {
    return rows.begin + 32 * block + threadIdx.x / kWarp * kRows + i;
  }
};

// Four codes a byte each; those that are smaller than `codes` take its place, NaN (255) aside.
__device__ inline uint32_t larger_codes(uint32_t folded, uint32_t codes) {
  return __vmaxu4(folded, codes & ~__vcmpeq4(codes, ~0u));
}

// The codes of a thread's four columns in each of its 16 rows.
struct Scaled {
  uint32_t codes[kBlocks][kRows] = {};

  __device__ void load(const Codes& args, const Square& square, uint32_t column) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // Down the columns a block has a code for each thread, whether it has rows for it or not.
        const int64_t row = args.scales_are_rowwise ? square.row(b, i) : square.rows.begin + 32 * b;
        if (row >= square.rows.end || column >= args.columns) continue;
        if (args.scales_are_rowwise) {
          codes[b][i] = args.source_scales.row(row)[column / 32] * 0x01010101u;
        } else {
          const uint8_t* const scales = args.source_scales.row(square.first_scale_row + b);
          codes[b][i] = *reinterpret_cast<const uint32_t*>(scales + column);
        }
      }
    }
  }
  // The largest of this thread's, in each column.
  __device__ uint32_t largest() const {
    uint32_t all = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) all = larger_codes(all, codes[b][i]);
    }
    return all;
  }
};

__device__ inline uint32_t largest_of_bytes(uint32_t w) {
  w = __vmaxu4(w, w >> 16);
  return __vmaxu4(w, w >> 8) & 0xFF;
}

// fold_element() of four codes, whose blocks have `codes`, into blocks with `folded`.
__device__ inline uint32_t fold_word(uint32_t word, uint32_t codes, uint32_t folded, bool is_e5m2) {
  if (codes == folded) return word;
  float factor[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t shift = (folded >> 8 * j & 0xFF) - (codes >> 8 * j & 0xFF);
    factor[j] = e8m0_to_float(static_cast<uint8_t>(shift < 127 ? 127 - shift : 0));
  }
  const float2 low = decode_pair(word, is_e5m2), high = decode_pair(word >> 16, is_e5m2);
  const uint32_t changed = encode_four(low.x * factor[0], low.y * factor[1], high.x * factor[2],
                                       high.y * factor[3], is_e5m2);
  // NaN and infinity stay; what has the code 255 becomes NaN.
  const uint32_t first_special = is_e5m2 ? 0x7C7C7C7Cu : 0x7F7F7F7Fu;
  const uint32_t special = __vcmpgeu4(word & 0x7F7F7F7Fu, first_special);
  const uint32_t lost = __vcmpeq4(codes, ~0u);
  return (((changed & ~special) | (word & special)) & ~lost) | (0x7F7F7F7Fu & lost);
}

// The scale of a tile, where tiles lie as the codes that are stored.
__device__ inline void store_tile_scale(const Codes& args, const Square& square, bool is_transposed,
                                        float scale) {
  const uint32_t column_tile = square.first_column / kSide;
  const uint32_t matrix = square.index / args.blocks_per_matrix;
  const uint32_t block = square.index % args.blocks_per_matrix;
  if (is_transposed) {
    args.scales.row(matrix * args.column_tiles + column_tile)[block] = scale;
  } else {
    args.scales.row(square.index)[column_tile] = scale;
  }
}

// Folds a thread's words; `shared` is for one code a warp.
template <Fold kFold>
__device__ void fold(const Codes& args, const Square& square, uint32_t column,
                     uint32_t (&w)[kBlocks][kRows], uint32_t* shared) {
  Scaled scaled;
  scaled.load(args, square, column);
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t column_tile = square.first_column / kSide;
  uint32_t all = scaled.largest();
  if constexpr (kFold == Fold::kTile) {
    const uint32_t in_warp = __reduce_max_sync(~0u, largest_of_bytes(all));
    if (lane == 0) shared[warp] = in_warp;
    __syncthreads();
    all = 0;
    for (int i = 0; i < kThreads / kWarp; ++i) all = max(all, shared[i]);
    if (threadIdx.x == 0)
      store_tile_scale(args, square, !args.scales_are_rowwise, e8m0_to_float(all));
    all *= 0x01010101u;
  }
  if constexpr (kFold == Fold::kColumn) {
    if (warp == 0 && column < args.columns) {
      float* const scales = args.scales.row(square.index) + column;
#pragma unroll
      for (int j = 0; j < 4; ++j) scales[j] = e8m0_to_float(all >> 8 * j & 0xFF);
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kFold == Fold::kRow) {  // blocks of eight lanes
        all = larger_codes(0, scaled.codes[b][i]);
        all = __reduce_max_sync(~0u, all & 0xFF) * 0x01010101u;
        if (lane == 0 && square.row(b, i) < square.rows.end) {
          args.scales.row(square.row(b, i))[column_tile] = e8m0_to_float(all & 0xFF);
        }
      }
      w[b][i] = fold_word(w[b][i], scaled.codes[b][i], all, args.is_e5m2);
    }
  }
}

// Writes a square transposed.
__device__ void store_square_transposed(const Codes& args, const Square& square,
                                        uint32_t (&w)[kBlocks][kRows], Transposed& transposed) {
  const auto lane = static_cast<int>(threadIdx.x % kWarp),
             warp = static_cast<int>(threadIdx.x / kWarp);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    transpose_four(w[b]);
    transposed.put(4 * lane, 8 * b + warp, w[b]);
  }
  __syncthreads();
  uint8_t* const target = args.target + square.index / args.blocks_per_matrix * args.matrix_stride +
                          int64_t{square.index % args.blocks_per_matrix} * kSide;
  for (uint32_t i = threadIdx.x; i < kSide * Transposed::kUnits; i += kThreads) {
    const uint32_t c = i / Transposed::kUnits, unit = i % Transposed::kUnits;
    if (square.first_column + c >= args.columns) continue;
    *reinterpret_cast<uint4*>(target + (square.first_column + c) * args.stride + 16 * unit) =
        transposed.unit(static_cast<int>(c), static_cast<int>(unit));
  }
}

template <Fold kFold, bool kTransposes>
__global__ void __launch_bounds__(kThreads) core_codes_kernel(const __grid_constant__ Codes args) {
  __shared__ uint4 shared[sizeof(Transposed) / sizeof(uint4)];
  const Square square(args);
  if (square.rows.size() == 0) return;
  const uint32_t column = square.first_column + 4 * (threadIdx.x % kWarp);
  uint32_t w[kBlocks][kRows] = {};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (square.row(b, i) >= square.rows.end || column >= args.columns) continue;
      w[b][i] = *reinterpret_cast<const uint32_t*>(args.source.row(square.row(b, i)) + column);
    }
  }
  if constexpr (kFold != Fold::kNone) {
    fold<kFold>(args, square, column, w, reinterpret_cast<uint32_t*>(shared));
    if (kFold == Fold::kTile) __syncthreads();
  }
  if (kFold == Fold::kNone && args.source_tiles.is_present() && threadIdx.x == 0) {
    const float* const scales = args.source_tiles.row(square.index);
    store_tile_scale(args, square, true, scales[square.first_column / kSide]);
  }
  if constexpr (kTransposes) {
    store_square_transposed(args, square, w, *reinterpret_cast<Transposed*>(shared));
  } else {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (square.row(b, i) >= square.rows.end || column >= args.columns) continue;
        *reinterpret_cast<uint32_t*>(args.target + square.row(b, i) * args.stride + column) =
            w[b][i];
      }
    }
  }
}

ScaleBlocks blocks_of(const TensorView& codes, const moire_groups& groups, bool is_transposed) {
  return scale_blocks(codes, groups, MOIRE_SCALING_FP8_BLOCK, is_transposed || codes.rank == 3);
}

}  // namespace

CoreCodes::CoreCodes(const moire_quantized& weight, bool is_transposed, const moire_quantized& made)
    : codes_(weight.data),
      scales_(weight.scales),
      is_transposed_(is_transposed),
      is_folded_(scales_.type() == DType::kE8M0),
      made_codes_(made.data),
      made_scales_(made.scales) {}

CoreCodes::CoreCodes(const TensorView& codes, const TensorView& scales, const moire_groups& groups,
                     bool is_transposed, Arena& arena)
    : codes_(codes),
      scales_(scales),
      groups_(groups),
      is_transposed_(is_transposed && !moire::is_transposed(codes, scales, groups)),
      is_folded_(scales.type() == DType::kE8M0),
      made_codes_(codes),
      made_scales_(scales) {
  if (launches() == 0) return;
  const int64_t columns = codes.columns(), tiles = ceil_div(columns, kSide);
  if (codes.rank == 3) {
    const moire_quantized made = take_core_weight(arena, codes, is_transposed_);
    made_codes_ = made.data;
    made_scales_ = made.scales;
  } else if (is_transposed_) {
    const int64_t blocks = blocks_of(codes, groups, true).count(kSide);
    made_codes_ = arena.take(codes.type(), columns, blocks * kSide);
    if (is_folded_) made_scales_ = arena.take_aligned(DType::kFP32, blocks, columns);
  } else {
    made_codes_ = arena.take_aligned(codes.type(), codes.num_rows(), columns);
    made_scales_ = arena.take_aligned(DType::kFP32, codes.num_rows(), tiles);
  }
}

void CoreCodes::make(Launcher& launcher) const {
  if (launches() == 0) return;
  const bool is_weight = codes_.rank == 3;
  const ScaleBlocks blocks = blocks_of(codes_, groups_, is_transposed_);
  const int64_t tiles = ceil_div(codes_.columns(), kSide);
  const Codes args{
      .source = matrix_of<const uint8_t>(codes_),
      .source_scales = matrix_of<const uint8_t>(scales_),
      .source_tiles = matrix_of<const float>(is_weight && !is_folded_ ? scales_ : TensorView()),
      .blocks = blocks,
      .target = static_cast<uint8_t*>(made_codes_.data),
      .stride = made_codes_.stride(),
      .matrix_stride = codes_.columns() * made_codes_.stride(),
      .scales = matrix_of<float>(made_scales_),
      .columns = static_cast<uint32_t>(codes_.columns()),
      .column_tiles = static_cast<uint32_t>(tiles),
      .blocks_per_matrix = is_weight ? blocks.blocks_per_matrix : UINT32_MAX,
      .scale_rows_per_matrix = is_weight ? static_cast<uint32_t>(scales_.shape[1]) : 0,
      .is_e5m2 = codes_.type() == DType::kE5M2,
      .scales_are_rowwise = !is_transposed_};
  const LaunchShape shape{blocks_for(blocks.count(kSide) * tiles, 1), kThreads};
  if (!is_folded_) {
    launcher.launch(core_codes_kernel<Fold::kNone, true>, shape, args);
  } else if (is_weight) {
    launcher.launch(is_transposed_ ? core_codes_kernel<Fold::kTile, true>
                                   : core_codes_kernel<Fold::kTile, false>,
                    shape, args);
  } else {
    launcher.launch(is_transposed_ ? core_codes_kernel<Fold::kColumn, true>
                                   : core_codes_kernel<Fold::kRow, false>,
                    shape, args);
  }
}

std::string CoreCodes::policy(std::string_view name) const {
  if (launches() == 0) return {};
  return concat(", after ", is_folded_ ? "folding " : "",
                is_folded_ && is_transposed_ ? "and " : "", is_transposed_ ? "transposing " : "",
                name);
}

}  // namespace moire::cuda::ops
