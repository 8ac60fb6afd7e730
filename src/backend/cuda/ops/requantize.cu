// requantize on CUDA: codes with scales of one direction become codes with scales of the other. A
// thread has four neighbouring columns of 16 rows, as words of codes, which it decodes once for the
// largest magnitudes and once more for what they give: to pairs of FP16 numbers where the scales
// allow it (half_words.cuh), else to floats, as the kernel of fractional scales does.
#include <type_traits>

#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/quantize.h"
#include "backend/cuda/ops/quantize_kernel.cuh"
#include "backend/cuda/ops/requantize_scales.cuh"

namespace moire::cuda::ops {
namespace {

// The first of this warp's elements that is infinite or NaN, noted.
template <class Words, int kScaling>
__device__ inline void note_first_word(const Words& words, bool is_e5m2, const Part<kScaling>& tile,
                                       const NonFiniteReporter& notes) {
  constexpr int kColumns = RequantizeTile<kScaling>::kColumns;
  uint32_t first = ~0U;  // counted along the tile's rows
  with_flag(is_e5m2, [&](auto is_wide) {
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
  with_flag(is_e5m2, [&](auto from_wide) {
    with_flag(to.is_e5m2, [&](auto to_wide) { store(from_wide, to_wide); });
  });
}

template <int kScaling, class Source>
using MadeScales =
    std::conditional_t<Source::kIsColumnwise, RowScales<kScaling>, ColumnScales<kScaling>>;

template <class Source>
__device__ inline const CopyTarget& target_of(const QuantizeTiles<Source>& args) {
  return Source::kIsColumnwise ? args.rowwise : args.columnwise;
}

// The part's copy; false, and no code is written, where an element is infinite or NaN, unless NaN
// is to be skipped.
template <bool kSkipsNan, int kScaling, class Source>
__device__ inline bool requantize_part(const QuantizeTiles<Source>& args,
                                       const Part<kScaling>& tile, typename Source::Words& words) {
  const CopyTarget& to = target_of(args);
  const bool is_e5m2 = args.source.is_e5m2;
  MadeScales<kScaling, Source> scales;
  with_flag(is_e5m2,
            [&](auto is_wide) { scales.template take_largest<kSkipsNan>(words, is_wide); });
  if (!scales.template make<kSkipsNan, Source::kVectors>(tile, to, args.is_fractional(),
                                                         args.source.columns))
    return false;
  words.forget_values();
  store_words<Source::kVectors>(words, is_e5m2, scales, to, tile, args.source.columns);
  return true;
}

// The same of a part with such elements: only few are.
template <int kScaling, class Source>
__device__ __noinline__ void requantize_odd(const QuantizeTiles<Source>& args,
                                            const Part<kScaling> tile,
                                            const NonFiniteReporter& notes) {
  typename Source::Words words;
  args.source.load(tile, words);
  note_first_word(words, args.source.is_e5m2, tile, notes);
  requantize_part<true>(args, tile, words);
}

// A warp's tile whose scales FP16 does not serve: it is read again.
template <int kScaling, class Source>
__device__ __noinline__ bool requantize_floats(const QuantizeTiles<Source>& args,
                                               const Part<kScaling> tile) {
  typename Source::Words words;
  args.source.load(tile, words);
  return requantize_part<false>(args, tile, words);
}

// Largest magnitudes of a part whose scales FP16 does not serve, and the codes of one whose scales
// are made: it is read again.
template <int kScaling, class Source>
__device__ __noinline__ MadeScales<kScaling, Source> largest_of_floats(
    const QuantizeTiles<Source>& args, const Part<kScaling> tile) {
  typename Source::Words words;
  args.source.load(tile, words);
  MadeScales<kScaling, Source> scales;
  with_flag(args.source.is_e5m2,
            [&](auto is_wide) { scales.template take_largest<false>(words, is_wide); });
  return scales;
}
template <int kScaling, class Source>
__device__ __noinline__ void store_floats(const QuantizeTiles<Source>& args,
                                          const Part<kScaling> tile,
                                          const MadeScales<kScaling, Source> scales) {
  typename Source::Words words;
  args.source.load(tile, words);
  store_words<Source::kVectors>(words, args.source.is_e5m2, scales, target_of(args), tile,
                                args.source.columns);
}

// False, and nothing is stored, where FP16 has no such factors.
template <bool kVectors, class Halves, class Made, int kScaling>
__device__ inline bool store_halves(const Halves& halves, bool is_e5m2, const Made& made,
                                    const CopyTarget& to, const Part<kScaling>& tile, int columns) {
  Made of_halves = made;
  if (!to_half_factors(of_halves.all(), halves.unit)) return false;
  HalfFactors<RequantizeTile<kScaling>, !Halves::kIsColumnwise> factors(of_halves.all());
  uint8_t* const first = to.data + tile.row(0) * to.stride + tile.column;
  const auto stride = static_cast<uint32_t>(to.stride);
  const auto store = [&](auto from_wide, auto to_wide, auto is_whole) {
    uint8_t* at[] = {first, first + uint64_t{stride} * (Halves::kRows / 2)};
    halves.for_each_row(from_wide, [&](int i, uint2 v) {
      const uint2 m = factors.of(i);
      const uint32_t word = encode_halves(product(v.x, m.x), product(v.y, m.y), to_wide.value);
      uint8_t*& p = at[i / (Halves::kRows / 2)];
      if (is_whole.value || tile.has_row(i)) {
        store_bytes<kVectors>(p, columns - tile.column, {word});
      }
      p += stride;
    });
  };
  with_flag(is_e5m2, [&](auto from_wide) {
    with_flag(to.is_e5m2, [&](auto to_wide) {
      with_flag(tile.is_whole(columns),
                [&](auto is_whole) { store(from_wide, to_wide, is_whole); });
    });
  });
  return true;
}

// The part's copy by pairs of FP16, of scales that are powers of two.
template <int kScaling, class Source>
__device__ inline bool requantize_halves(const QuantizeTiles<Source>& args,
                                         const Part<kScaling>& tile,
                                         typename Source::Words& words) {
  const CopyTarget& to = target_of(args);
  const int columns = args.source.columns;
  const bool is_e5m2 = args.source.is_e5m2;
  HalfWords<RequantizeTile<kScaling>, Source::kIsColumnwise> halves{words};
  MadeScales<kScaling, Source> scales{};
  bool by_floats = false;
  if (words.has_rows) {
    by_floats = !halves.take_unit(is_e5m2);
    if (by_floats) {
      if constexpr (Source::Tile::kIsWarps) return requantize_floats(args, tile);
      scales = largest_of_floats(args, tile);
    } else {
      with_flag(is_e5m2, [&](auto is_wide) { scales.take_largest_halves(halves, is_wide); });
    }
  }
  if (!scales.template make<false, Source::kVectors>(tile, to, false, columns)) return false;
  if (!words.has_rows) return true;
  words.forget_values();
  if (by_floats || !store_halves<Source::kVectors>(halves, is_e5m2, scales, to, tile, columns)) {
    if constexpr (Source::Tile::kIsWarps) return requantize_floats(args, tile);
    store_floats<kScaling>(args, tile, scales);
  }
  return true;
}

template <int kScaling, class Source, bool kIsFractional>
__global__ void __launch_bounds__(RequantizeTile<kScaling>::kThreads,
                                  RequantizeTile<kScaling>::kBlocks)
    requantize_kernel(const __grid_constant__ QuantizeTiles<Source> args,
                      const __grid_constant__ Reporter reporter,
                      const __grid_constant__ NonFiniteReporter notes) {
  using Tile = RequantizeTile<kScaling>;
  if (blockIdx.x == 0) check_groups(args.blocks.groups, reporter, threadIdx.x, Tile::kThreads);
  const auto [row_block, first, end] = args.spans.at(blockIdx.x);
  const RowRange rows = args.blocks.template at_together<Tile::kRows>(row_block, row_block);
  const auto part = [&](uint32_t i) {
    const uint32_t tile = i * Tile::kTiles + threadIdx.x / Tile::kTileThreads;
    return Part<kScaling>(row_block, rows, static_cast<int>(tile) * Tile::kColumns,
                          args.source.columns);
  };
  if (rows.size() == 0) return zero_span(args, first, end, part);
  // One turn at least: a compiler that knows it spills less.
  uint32_t i = first;
#pragma unroll 1
  do {
    const Part<kScaling> tile = part(i);
    // A warp's may lie past the last column; a block's does not.
    if (Tile::kIsWarps && tile.first_column >= args.source.columns) break;
    typename Source::Words words;
    args.source.load(tile, words);
    const bool is_done = kIsFractional ? requantize_part<false>(args, tile, words)
                                       : requantize_halves(args, tile, words);
    if (!is_done) requantize_odd(args, tile, notes);
  } while (++i < end);
  if constexpr (Source::kIsColumnwise) {
    SpanScales<kScaling>::store(args.rowwise, rows, first, end, args.source.columns);
  }
  if (args.zeroes_tail) zero_tail(args, part(first));
}

bool takes_vectors(const RequantizeArgs& args) {
  return opens_words(args.source, args.direction) && opens_words(args.target, 1 - args.direction);
}

template <int kScaling, int kDirection, bool kVectors>
void launch(Launcher& launcher, const RequantizeArgs& args, const NonFiniteReporter& notes) {
  using Source = WordRows<RequantizeTile<kScaling>, kDirection == MOIRE_COLUMNWISE, kVectors>;
  QuantizeTiles<Source> tiles{};
  set_source(tiles, args, true);
  (Source::kIsColumnwise ? tiles.rowwise : tiles.columnwise) = copy_target(args.target);
  tiles.has_fractional_scales = args.fractional_scales != 0;
  constexpr bool kMayBe = kScaling != MOIRE_SCALING_MXFP8;
  const auto kernel = kMayBe && tiles.has_fractional_scales
                          ? requantize_kernel<kScaling, Source, kMayBe>
                          : requantize_kernel<kScaling, Source, false>;
  using Tile = RequantizeTile<kScaling>;
  launch_spans<Tile>(launcher, kernel, tiles, {Tile::kMostTiles, Tile::kBlocks}, notes);
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

const Implementation<RequantizeArgs> kRequantize = on_cuda(supports_words, policy, run);

}  // namespace moire::cuda::ops
