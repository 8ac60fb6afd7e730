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
    rows = args.blocks.at<kSide>(index);
    first_scale_row = args.blocks.kind == ScaleBlocks::kRagged
                          ? partial_index<kSide>(index, rows.begin)
                          : int64_t{index / args.blocks_per_matrix} * args.scale_rows_per_matrix +
                                index % args.blocks_per_matrix * int64_t{kBlocks};
  }
  // The first of this thread's rows, and how many are left from there.
  __device__ int64_t first_row() const { return rows.begin + threadIdx.x / kWarp * kRows; }
  __device__ int left() const { return static_cast<int>(rows.end - first_row()); }
};

// Calls visit(block, i, word) for each of a thread's words.
template <class Visit>
__device__ inline void for_each_word(uint32_t (&w)[kBlocks][kRows], Visit&& visit) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) visit(b, i, w[b][i]);
  }
}

// How far the blocks of 32 in a square are shifted where they are folded: of scales along the rows
// [128][4], down the columns [4][128].
struct Shifts {
  static constexpr uint32_t kLost = 255;  // the block's code is that, and no element stays
  alignas(4) uint8_t bytes[kBlocks * kSide];
  uint32_t largest[kThreads / kWarp];

  // Of four columns in a row, a byte each.
  __device__ uint32_t of_word(bool along_rows, int block, int i) const {
    const uint32_t lane = threadIdx.x % kWarp, row = 32 * block + threadIdx.x / kWarp * kRows + i;
    if (along_rows) return bytes[kBlocks * row + lane / 8] * 0x01010101u;
    return reinterpret_cast<const uint32_t*>(bytes + kSide * block)[lane];
  }
};

// fold_element() of four codes, none of which is NaN or infinity or lost; `shifts` has a byte for
// each.
template <bool kIsE5m2>
__device__ inline uint32_t fold_word(uint32_t word, uint32_t shifts, bool are_equal) {
  const auto shift = [&](int j) { return shifts >> (are_equal ? 0 : 8 * j) & 0xFF; };
  return fold_four(word, kIsE5m2,
                   [&](int j) { return fold_factors(shift(j), shift(j + 1), kIsE5m2); });
}
// The same of any four.
template <class Format>
__device__ __noinline__ uint32_t fold_each(uint32_t word, uint32_t shifts) {
  uint32_t folded = 0;
  for (int j = 0; j < 32; j += 8) {
    const auto shift = static_cast<uint8_t>(shifts >> j);
    const uint8_t code = shift == Shifts::kLost ? 255 : 0;
    folded |= uint32_t{fold_element<Format>(static_cast<uint8_t>(word >> j), code, shift)} << j;
  }
  return folded;
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

// The scale of what thread t sees to: a row or column, or for thread 0 the tile.
template <Fold kFold>
__device__ void store_scale(const Codes& args, const Square& square, float scale) {
  const uint32_t t = threadIdx.x;
  if constexpr (kFold == Fold::kTile) {
    if (t == 0) store_tile_scale(args, square, !args.scales_are_rowwise, scale);
  } else if constexpr (kFold == Fold::kRow) {
    args.scales.row(square.rows.begin + t)[square.first_column / kSide] = scale;
  } else {
    args.scales.row(square.index)[square.first_column + t] = scale;
  }
}

// A word's codes of finite numbers other than 0, a byte of ones for each.
__device__ inline uint32_t finite_numbers(uint32_t word, bool is_e5m2) {
  const uint32_t end = is_e5m2 ? E5M2::kFirstSpecial : E4M3::kFirstSpecial;
  return __vcmpltu4(__vsub4(word & 0x7F7F7F7Fu, 0x01010101u), (end - 1) * 0x01010101u);
}

// A scale of 1 for folded blocks that hold no such number, where thread t has one with code 0. A
// block calls it together.
template <Fold kFold>
__device__ void replace_scales_of_zeros(const Codes& args, const Square& square,
                                        uint32_t (&w)[kBlocks][kRows], bool has_code_0) {
  __shared__ uint32_t words[kSide / 4];  // by row or column a byte; of a tile in the first
  auto* const holds = reinterpret_cast<uint8_t*>(words);
  const uint32_t t = threadIdx.x;
  if (t < kSide / 4) words[t] = 0;
  __syncthreads();
  uint32_t of_columns = 0;
  for_each_word(w, [&](int b, int i, uint32_t word) {
    const uint32_t numbers = finite_numbers(word, args.is_e5m2);
    of_columns |= numbers;
    if (kFold == Fold::kRow && numbers != 0) holds[32 * b + t / kWarp * kRows + i] = 1;
  });
  if (kFold == Fold::kColumn) atomicOr(&words[t % kWarp], of_columns);
  if (kFold == Fold::kTile && of_columns != 0) holds[0] = 1;
  __syncthreads();
  if (has_code_0 && holds[kFold == Fold::kTile ? 0 : t] == 0) {
    store_scale<kFold>(args, square, fold_scale(0, /*is_nonzero=*/false));
  }
}

// What thread t met in the four blocks that it sees to.
struct Met {
  bool is_lost, has_code_0;  // a block with the code 255; a folded one with 0
};

// The scales of a square's folded blocks, and how far its blocks are shifted: thread t sees to the
// four blocks in row or column t.
template <Fold kFold>
__device__ Met make_shifts(const Codes& args, const Square& square, bool along_rows,
                           Shifts& shifts) {
  const uint32_t t = threadIdx.x;
  const int64_t rows = square.rows.size(), columns = args.columns - square.first_column;
  const bool exists = t < kSide && t < (along_rows ? rows : columns);
  uint32_t codes[kBlocks] = {}, folded = 0;
#pragma unroll
  for (uint32_t b = 0; b < kBlocks; ++b) {
    if (!exists || 32 * b >= (along_rows ? columns : rows)) continue;
    codes[b] = along_rows
                   ? args.source_scales.row(square.rows.begin + t)[square.first_column / 32 + b]
                   : args.source_scales.row(square.first_scale_row + b)[square.first_column + t];
    folded = fold_code(static_cast<uint8_t>(folded), static_cast<uint8_t>(codes[b]));
  }
  if constexpr (kFold == Fold::kTile) {
    const uint32_t in_warp = __reduce_max_sync(~0u, folded);
    if (t % kWarp == 0) shifts.largest[t / kWarp] = in_warp;
    __syncthreads();
    for (const uint32_t of_warp : shifts.largest) folded = max(folded, of_warp);
  }
  if (exists) store_scale<kFold>(args, square, e8m0_to_float(folded));
  if (t >= kSide) return {};
  bool is_lost = false;
#pragma unroll
  for (uint32_t b = 0; b < kBlocks; ++b) {
    is_lost = is_lost || codes[b] == 255;
    shifts.bytes[along_rows ? kBlocks * t + b : kSide * b + t] =
        static_cast<uint8_t>(codes[b] == 255 ? Shifts::kLost : folded - codes[b]);
  }
  return {is_lost, exists && folded == 0};
}

// Folds a thread's words. A block calls it together.
template <Fold kFold>
__device__ void fold(const Codes& args, const Square& square, uint32_t (&w)[kBlocks][kRows]) {
  __shared__ Shifts shifts;
  const bool along_rows = kFold == Fold::kTile ? args.scales_are_rowwise : kFold == Fold::kRow;
  const uint32_t to_sign = 0x80 - (args.is_e5m2 ? E5M2::kFirstSpecial : E4M3::kFirstSpecial);
  uint32_t special = 0;  // a byte's sign where it is NaN or infinity
  for_each_word(
      w, [&](int, int, uint32_t word) { special |= (word & 0x7F7F7F7Fu) + to_sign * 0x01010101u; });
  const auto [is_lost, has_code_0] = make_shifts<kFold>(args, square, along_rows, shifts);
  if (__syncthreads_or(has_code_0)) {
    replace_scales_of_zeros<kFold>(args, square, w, has_code_0);
  }
  const bool is_odd = __syncthreads_or(is_lost || (special & 0x80808080u) != 0) != 0;
  if (is_odd) {
    for_each_word(w, [&](int b, int i, uint32_t& word) {
      const uint32_t shift = shifts.of_word(along_rows, b, i);
      word = args.is_e5m2 ? fold_each<E5M2>(word, shift) : fold_each<E4M3>(word, shift);
    });
    return;
  }
  with_flag(args.is_e5m2, [&](auto is_e5m2) {
    for_each_word(w, [&](int b, int i, uint32_t& word) {
      word = fold_word<is_e5m2.value>(word, shifts.of_word(along_rows, b, i), along_rows);
    });
  });
}

__device__ void store_square_transposed(const Codes& args, const Square& square,
                                        uint32_t (&w)[kBlocks][kRows]) {
  __shared__ TransposedTile transposed;
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
  transposed.store<kThreads>(target + square.first_column * args.stride, args.stride,
                             static_cast<int>(args.columns - square.first_column));
}

template <Fold kFold, bool kTransposes>
__global__ void __launch_bounds__(kThreads) core_codes_kernel(const __grid_constant__ Codes args) {
  const Square square(args);
  if (square.rows.size() == 0) return;
  const uint32_t column = square.first_column + 4 * (threadIdx.x % kWarp);
  const int left = column < args.columns ? square.left() : 0;
  const uint8_t* const from = args.source.row(square.first_row()) + column;
  uint32_t w[kBlocks][kRows] = {};
  for_each_word(w, [&](int b, int i, uint32_t& word) {
    const int row = 32 * b + i;
    if (row < left) word = *reinterpret_cast<const uint32_t*>(from + row * args.source.stride);
  });
  if constexpr (kFold != Fold::kNone) fold<kFold>(args, square, w);
  if (kFold == Fold::kNone && args.source_tiles.is_present() && threadIdx.x == 0) {
    const float* const scales = args.source_tiles.row(square.index);
    store_tile_scale(args, square, true, scales[square.first_column / kSide]);
  }
  if constexpr (kTransposes) {
    store_square_transposed(args, square, w);
  } else {
    uint8_t* const to = args.target + square.first_row() * args.stride + column;
    for_each_word(w, [&](int b, int i, uint32_t word) {
      const int row = 32 * b + i;
      if (row < left) *reinterpret_cast<uint32_t*>(to + row * args.stride) = word;
    });
  }
}

ScaleBlocks blocks_of(const TensorView& codes, const moire_groups& groups, bool is_transposed) {
  return scale_blocks(codes, groups, MOIRE_SCALING_FP8_BLOCK, is_transposed || codes.rank == 3);
}

}  // namespace

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
  const auto kernel = !is_folded_                   ? core_codes_kernel<Fold::kNone, true>
                      : is_weight && is_transposed_ ? core_codes_kernel<Fold::kTile, true>
                      : is_weight                   ? core_codes_kernel<Fold::kTile, false>
                      : is_transposed_              ? core_codes_kernel<Fold::kColumn, true>
                                                    : core_codes_kernel<Fold::kRow, false>;
  launcher.launch(kernel, {blocks_for(blocks.count(kSide) * tiles, 1), kThreads}, args);
}

std::string CoreCodes::policy(std::string_view name) const {
  if (launches() == 0) return {};
  return concat(", after ", is_folded_ ? "folding " : "",
                is_folded_ && is_transposed_ ? "and " : "", is_transposed_ ? "transposing " : "",
                name);
}

}  // namespace moire::cuda::ops
