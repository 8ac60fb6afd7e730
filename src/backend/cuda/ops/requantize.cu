// requantize on CUDA: codes with scales of one direction become codes with scales of the other. A
// thread has four neighbouring columns of 16 rows, as words of codes in registers, which it decodes
// once for the largest magnitudes and once more for what they give.
//
// Down the columns a thread has its rows' largest at once. The two halves of a warp, which have
// MXFP8's 32 rows, exchange theirs; eight warps, which have 128 rows, leave theirs in shared
// memory, where a thread for each column makes its scale. Along the rows, lanes exchange theirs so
// that each ends with rows of its own, makes their scales and lends the multipliers.
#include <type_traits>

#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/code_words.cuh"
#include "backend/cuda/ops/quantize.h"
#include "backend/cuda/ops/quantize_kernel.cuh"

namespace moire::cuda::ops {
namespace {

template <int kScaling>
struct RequantizeTile
    : WordTile<kScaling, std::conditional_t<kScaling == MOIRE_SCALING_MXFP8,
                                            TileSizes<256, kWarp, 32, 64, kFour>,
                                            TileSizes<256, 256, 128, 128, kFour>>> {
  static constexpr int kBlocks = 4;  // of a multiprocessor
};

// Tiles side by side, which are walked one after the other: the group of scales per 128 is searched
// for once.
template <int kScaling>
struct RequantizeStrip : RequantizeTile<kScaling> {
  using Tile = RequantizeTile<kScaling>;
  static constexpr int kColumns = Tile::kColumns * (Tile::kIsWarps ? 1 : 2);
};

template <int kScaling>
using Part = PartOf<RequantizeTile<kScaling>>;

template <bool kSkipsNan>
__device__ inline float larger(float a, float b) {
  if constexpr (kSkipsNan) return fmaxf(a, b);
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}
__device__ inline bool is_finite(float amax) { return bit_cast<uint32_t>(amax) < kInfinityBits; }

// The largest of row `lane % kRows` among kLanes lanes, each of which has one of every row: at each
// step a lane gives half of its rows away, until one is left.
template <bool kSkipsNan, int kLanes, int kRows>
__device__ inline float largest_of_owned(float (&rows)[kRows]) {
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) {
    const bool is_upper = (threadIdx.x & static_cast<unsigned>(bit)) != 0;
#pragma unroll
    for (int i = 0; i < kRows; i += 2 * bit) {
      float kept = rows[i], given = rows[i];
      if (bit < kRows) {
        kept = is_upper ? rows[i + bit] : rows[i];
        given = is_upper ? rows[i] : rows[i + bit];
      }
      rows[i] = larger<kSkipsNan>(kept, __shfl_xor_sync(kAllLanes, given, bit));
    }
  }
  return rows[0];
}

// Scales along the rows.
template <int kScaling>
struct RowScales {
  using Tile = RequantizeTile<kScaling>;
  using S = Scales<kScaling>;
  float owned[Tile::kOwned];  // largest magnitudes, then multipliers

  template <bool kSkipsNan, class Words, class IsE5m2>
  __device__ void take_largest(const Words& words, IsE5m2 is_e5m2) {
    float rows[Tile::kTurn];
    for (float& row : owned) row = 0;
    words.for_each_row(is_e5m2, [&](int i, const float(&v)[kFour]) {
      float& row = rows[i % Tile::kTurn];
      row = larger<kSkipsNan>(larger<kSkipsNan>(fabsf(v[0]), fabsf(v[1])),
                              larger<kSkipsNan>(fabsf(v[2]), fabsf(v[3])));
      if (kSkipsNan) row = fmaxf(row, 0.0F);  // of nothing but NaN
      if (i % Tile::kTurn != Tile::kTurn - 1) return;
      owned[i / Tile::kTurn] = largest_of_owned<kSkipsNan, Tile::kLanes>(rows);
    });
  }
  // False where an element is infinite or NaN, unless NaN is skipped.
  template <bool kSkipsNan, bool kVectors>
  __device__ bool make(const Part<kScaling>& tile, const CopyTarget& to, bool fractional,
                       int columns) {
    bool are_finite = true;
#pragma unroll
    for (const float amax : owned) are_finite = are_finite && is_finite(amax);
    if (!kSkipsNan && __any_sync(kAllLanes, !are_finite)) return false;
    const int rows = tile.template rows_of_lanes<Tile::kLanes>();
    const auto lane = static_cast<int>(threadIdx.x) % Tile::kLanes;
#pragma unroll
    for (int k = 0; k < Tile::kOwned; ++k) {
      const auto scale = S::of(owned[k], to.is_e5m2, fractional);
      owned[k] = scale.multiplier;
      const int i = Tile::owned_row(k);
      if (lane >= Tile::kTurn || i >= rows) continue;
      static_cast<typename S::Stored*>(
          to.scales)[tile.row(i) * to.scale_stride + tile.column / S::kBlock] = scale.scale;
    }
    return true;
  }
  __device__ float4 multipliers(int i) const {
    const float m = Tile::lent(owned, i);
    return {m, m, m, m};
  }
};

// Largest magnitudes, then multipliers, of a thread's columns.
struct FourColumns {
  float4 four;

  template <bool kSkipsNan, class Words, class IsE5m2>
  __device__ void take_largest(const Words& words, IsE5m2 is_e5m2) {
    four = {};
    words.for_each_row(is_e5m2, [&](int, const float(&v)[kFour]) {
      take_larger<kSkipsNan>({fabsf(v[0]), fabsf(v[1]), fabsf(v[2]), fabsf(v[3])});
    });
  }
  __device__ float4 multipliers(int) const { return four; }

 protected:
  template <bool kSkipsNan>
  __device__ void take_larger(const float4& other) {
    four = {larger<kSkipsNan>(four.x, other.x), larger<kSkipsNan>(four.y, other.y),
            larger<kSkipsNan>(four.z, other.z), larger<kSkipsNan>(four.w, other.w)};
  }
};

// Scales down the columns of a warp's tile, whose halves have the same columns.
template <int kScaling>
struct ColumnScales : FourColumns {
  using Tile = RequantizeTile<kScaling>;

  template <bool kSkipsNan, bool kVectors>
  __device__ bool make(const Part<kScaling>& tile, const CopyTarget& to, bool fractional,
                       int columns) {
    const auto of_other = [](float v) { return __shfl_xor_sync(kAllLanes, v, Tile::kPieces); };
    take_larger<kSkipsNan>(
        {of_other(four.x), of_other(four.y), of_other(four.z), of_other(four.w)});
    const bool are_finite =
        is_finite(four.x) && is_finite(four.y) && is_finite(four.z) && is_finite(four.w);
    if (!kSkipsNan && __any_sync(kAllLanes, !are_finite)) return false;
    const auto of = [&](float amax) { return mx_scale_of(amax, to.is_e5m2); };
    const auto x = of(four.x), y = of(four.y), z = of(four.z), w = of(four.w);
    four = {x.multiplier, y.multiplier, z.multiplier, w.multiplier};
    const int left = columns - tile.column;
    if (Tile::thread() >= Tile::kPieces || left <= 0) return true;
    store_bytes<kVectors>(
        static_cast<uint8_t*>(to.scales) + tile.index * to.scale_stride + tile.column, left,
        {__byte_perm(x.scale | y.scale << 8, z.scale | w.scale << 8, 0x5410)});
    return true;
  }
};

// Scales down the columns of a block's tile: thread t makes that of column t.
template <>
struct ColumnScales<MOIRE_SCALING_FP8_BLOCK> : FourColumns {
  using Tile = RequantizeTile<MOIRE_SCALING_FP8_BLOCK>;

  template <bool kSkipsNan, bool kVectors>
  __device__ bool make(const Part<MOIRE_SCALING_FP8_BLOCK>& tile, const CopyTarget& to,
                       bool fractional, int columns) {
    __shared__ float4 of_warps[Tile::kThreads / kWarp][kWarp], made[kWarp];
    const uint32_t t = threadIdx.x, lane = t % kWarp;
    of_warps[t / kWarp][lane] = four;
    __syncthreads();
    float amax = 0;
    if (t < Tile::kColumns) {
#pragma unroll
      for (const auto& of_warp : of_warps) {
        amax = larger<kSkipsNan>(amax, reinterpret_cast<const float*>(of_warp)[t]);
      }
      const auto scale = block_scale_of(amax, to.is_e5m2, fractional);
      reinterpret_cast<float*>(made)[t] = scale.multiplier;
      const int column = tile.first_column + static_cast<int>(t);
      auto* const row = static_cast<float*>(to.scales) + tile.index * to.scale_stride;
      if (column < columns) row[column] = scale.scale;
    }
    const bool is_odd = __syncthreads_or(!is_finite(amax)) != 0;
    four = made[lane];
    return kSkipsNan || !is_odd;
  }
};

// The first of this warp's elements that is infinite or NaN, noted.
template <class Words, int kScaling>
__device__ inline void note_first_word(const Words& words, bool is_e5m2, const Part<kScaling>& tile,
                                       const NonFiniteReporter& notes) {
  constexpr int kColumns = RequantizeTile<kScaling>::kColumns;
  uint32_t first = ~0U;  // counted along the tile's rows
  with_element(is_e5m2, [&](auto is_wide) {
    words.for_each_row(is_wide, [&](int i, const float(&v)[kFour]) {
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        if (is_finite(fabsf(v[j])) || !tile.has_row(i)) continue;
        const int column = tile.column - tile.first_column + j;
        first = min(first, static_cast<uint32_t>((tile.first_row + i) * kColumns + column));
      }
    });
  });
  first = __reduce_min_sync(kAllLanes, first);
  if (first == ~0U || threadIdx.x % kWarp != 0) return;
  const int64_t row = tile.begin + first / kColumns;
  note_non_finite(notes, row, tile.first_column + first % kColumns, row);
}

template <bool kVectors, class Words, class Made, int kScaling>
__device__ inline void store_words(const Words& words, bool is_e5m2, const Made& made,
                                   const CopyTarget& to, const Part<kScaling>& tile, int columns) {
  uint8_t* const first = to.data + tile.row(0) * to.stride + tile.column;
  const auto store = [&](auto from_wide, auto to_wide) {
    uint8_t* p = first;
    words.for_each_row(from_wide, [&](int i, const float(&v)[kFour]) {
      const float4 m = made.multipliers(i);
      const uint32_t word =
          encode_four(v[0] * m.x, v[1] * m.y, v[2] * m.z, v[3] * m.w, to_wide.value);
      if (tile.has_row(i)) store_bytes<kVectors>(p, columns - tile.column, {word});
      p += to.stride;
    });
  };
  with_element(is_e5m2, [&](auto from_wide) {
    with_element(to.is_e5m2, [&](auto to_wide) { store(from_wide, to_wide); });
  });
}

// The part's copy; false, and no code is written, where an element is infinite or NaN, unless NaN
// is to be skipped.
template <bool kSkipsNan, int kScaling, class Source>
__device__ inline bool requantize_part(const QuantizeTiles<Source>& args,
                                       const Part<kScaling>& tile, typename Source::Words& words) {
  constexpr bool kToRows = Source::kIsColumnwise;
  const CopyTarget& to = kToRows ? args.rowwise : args.columnwise;
  const bool is_e5m2 = args.source.is_e5m2;
  std::conditional_t<kToRows, RowScales<kScaling>, ColumnScales<kScaling>> scales;
  with_element(is_e5m2,
               [&](auto is_wide) { scales.template take_largest<kSkipsNan>(words, is_wide); });
  if (!scales.template make<kSkipsNan, Source::kVectors>(tile, to, args.is_fractional(),
                                                         args.source.columns))
    return false;
  words.forget_values();
  store_words<Source::kVectors>(words, is_e5m2, scales, to, tile, args.source.columns);
  return true;
}

// The same of a part with such elements, which is read again: only few are.
template <int kScaling, class Source>
__device__ __noinline__ void requantize_odd(const QuantizeTiles<Source>& args,
                                            const Part<kScaling> tile,
                                            const NonFiniteReporter& notes) {
  typename Source::Words words;
  args.source.load(tile, words);
  note_first_word(words, args.source.is_e5m2, tile, notes);
  requantize_part<true>(args, tile, words);
}

template <int kScaling, class Source>
__global__ void __launch_bounds__(RequantizeTile<kScaling>::kThreads,
                                  RequantizeTile<kScaling>::kBlocks)
    requantize_kernel(const __grid_constant__ QuantizeTiles<Source> args,
                      const __grid_constant__ Reporter reporter,
                      const __grid_constant__ NonFiniteReporter notes) {
  using Strip = RequantizeStrip<kScaling>;
  if (blockIdx.x == 0) check_groups(args.blocks.groups, reporter, threadIdx.x, Strip::kThreads);
  const uint32_t first = blockIdx.x * Strip::kTiles;
  const uint32_t number = first + threadIdx.x / Strip::kTileThreads;
  const uint32_t block = number / args.column_tiles;
  const RowRange rows = args.blocks.at_together<Strip::kRows>(block, first / args.column_tiles);
  int column = static_cast<int>(number % args.column_tiles) * Strip::kColumns;
  const int end = min(column + Strip::kColumns, args.source.columns);
  // One turn at least: a compiler that knows it spills less.
#pragma unroll 1
  for (bool is_first = true; is_first || column < end;
       column += RequantizeTile<kScaling>::kColumns) {
    const Part<kScaling> tile(block, rows, column, args.source.columns);
    if (args.zeroes_tail) zero_tail(args, tile, is_first);
    is_first = false;
    if (tile.is_empty) continue;
    typename Source::Words words;
    args.source.load(tile, words);
    if (!requantize_part<false>(args, tile, words)) requantize_odd(args, tile, notes);
  }
}

bool takes_vectors(const RequantizeArgs& args) {
  return opens_eights(args.source, args.direction) && opens_eights(args.target, 1 - args.direction);
}

template <int kScaling, int kDirection, bool kVectors>
void launch(Launcher& launcher, const RequantizeArgs& args, const NonFiniteReporter& notes) {
  using Source = WordRows<RequantizeTile<kScaling>, kDirection == MOIRE_COLUMNWISE, kVectors>;
  QuantizeTiles<Source> tiles{};
  set_source(tiles, args, true);
  (Source::kIsColumnwise ? tiles.rowwise : tiles.columnwise) = copy_target(args.target);
  tiles.has_fractional_scales = args.fractional_scales != 0;
  launch_tiles<RequantizeStrip<kScaling>>(launcher, requantize_kernel<kScaling, Source>, tiles,
                                          notes);
}

Status run(const Context& context, const RequantizeArgs& args) {
  Launcher launcher(context, "requantize");
  const auto notes = non_finite_reporter(context, {"requantize", "source"}, args.source.data, true);
  with_blocks(args.scaling, args.direction, [&]<int kScaling, int kDirection>() {
    (takes_vectors(args) ? launch<kScaling, kDirection, true>
                         : launch<kScaling, kDirection, false>)(launcher, args, notes);
  });
  return launcher.status();
}

std::string policy(const DeviceState&, const RequantizeArgs& args) {
  return with_blocks(args.scaling, args.direction, [&]<int kScaling, int>() {
    using Tile = RequantizeTile<kScaling>;
    return tiles_policy(Tile::kRows, Tile::kColumns, "four", takes_vectors(args));
  });
}

}  // namespace

const Implementation<RequantizeArgs> kRequantize = on_cuda(supports_columns, policy, run);

}  // namespace moire::cuda::ops
