// The scales that requantize makes, and what their elements are multiplied by. Down the columns a
// thread has its rows' largest at once. The two halves of a warp, which have MXFP8's 32 rows,
// exchange theirs; eight warps, which have 128 rows, leave theirs in shared memory, where a thread
// for each column makes its scale. Along the rows, lanes exchange theirs so that each ends with
// rows of its own, makes their scales and lends the multipliers.
#pragma once

#include <type_traits>

#include "backend/cuda/ops/half_words.cuh"
#include "backend/cuda/ops/quantize_store.cuh"

namespace moire::cuda::ops {

template <int kScaling>
struct RequantizeTile
    : WordTile<kScaling, std::conditional_t<kScaling == MOIRE_SCALING_MXFP8,
                                            TileSizes<128, kWarp, 32, 64, kFour>,
                                            TileSizes<256, 256, 128, 128, kFour>>> {
  static constexpr int kBlocks = 1024 / RequantizeTile::kThreads;  // of a multiprocessor
  static constexpr int kMostTiles = 2;  // side by side, which a block does one after the other
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

// What a block's elements are multiplied by: kOfZeros where all are.
template <int kScaling>
__device__ inline float multiplier_of(float amax, float multiplier) {
  return !Scales<kScaling>::kIsMx && amax == 0 ? kOfZeros : multiplier;
}

// The largest of row `lane % kRows` among kLanes lanes, each of which has one of every row: at each
// step a lane gives half of its rows away, until one is left.
template <int kLanes, class T, int kRows, class Larger>
__device__ inline T largest_of_owned(T (&rows)[kRows], Larger&& larger_of) {
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) {
    const bool is_upper = (threadIdx.x & static_cast<unsigned>(bit)) != 0;
#pragma unroll
    for (int i = 0; i < kRows; i += 2 * bit) {
      T kept = rows[i], given = rows[i];
      if (bit < kRows) {
        kept = is_upper ? rows[i + bit] : rows[i];
        given = is_upper ? rows[i] : rows[i + bit];
      }
      rows[i] = larger_of(kept, __shfl_xor_sync(kAllLanes, given, bit));
    }
  }
  return rows[0];
}

// Scales along the rows of a span's tiles, which are neighbours: the block stores them together
// when it is done, a word a thread. Each tile alone would take a sector of memory for a few bytes.
template <int kScaling>
struct SpanScales {
  using Tile = RequantizeTile<kScaling>;
  using Stored = typename Scales<kScaling>::Stored;
  static constexpr int kBlock = Scales<kScaling>::kBlock;
  static constexpr int kOfTiles = Tile::kTiles * Tile::kColumns / kBlock;  // side by side
  static constexpr int kCount = Tile::kMostTiles * kOfTiles;
  static constexpr int kOfWord = int{sizeof(uint32_t)} / int{sizeof(Stored)},
                       kWords = kCount / kOfWord;
  static_assert(Tile::kRows * kWords == Tile::kThreads);

  __device__ static auto& memory() {
    __shared__ uint32_t words[Tile::kRows][kWords];
    return words;
  }
  __device__ static void put(int row, int column, Stored scale) {
    reinterpret_cast<Stored*>(memory()[row])[column / kBlock % kCount] = scale;
  }
  // Of tiles first ... end - 1. A block calls it together.
  __device__ static void store(const CopyTarget& to, const RowRange& rows, uint32_t first,
                               uint32_t end, int columns) {
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x) / kWords;
    const int block = static_cast<int>(first * kOfTiles + threadIdx.x % kWords * kOfWord);
    const int last = min(static_cast<int>(end) * kOfTiles, (columns + kBlock - 1) / kBlock);
    if (row >= rows.size() || block >= last) return;
    const uint32_t word = memory()[row][block % kCount / kOfWord];
    auto* const p = static_cast<Stored*>(to.scales) + (rows.begin + row) * to.scale_stride + block;
    if (reinterpret_cast<uintptr_t>(p) % sizeof(word) == 0 && block + kOfWord <= last) {
      *reinterpret_cast<uint32_t*>(p) = word;
      return;
    }
    for (int i = 0; i < min(last - block, kOfWord); ++i) {
      p[i] = reinterpret_cast<const Stored*>(&word)[i];
    }
  }
};

// Scales along the rows.
template <int kScaling>
struct RowScales {
  using Tile = RequantizeTile<kScaling>;
  using S = Scales<kScaling>;
  float owned[Tile::kOwned];  // largest magnitudes, then multipliers

  __device__ auto& all() { return owned; }
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
      owned[i / Tile::kTurn] = largest_of_owned<Tile::kLanes>(rows, larger<kSkipsNan>);
    });
  }
  template <class IsE5m2>
  __device__ void take_largest_halves(const HalfWords<Tile, true>& halves, IsE5m2 is_e5m2) {
    constexpr int kRows = RowFactors<Tile>::kRows;
    uint32_t rows[kRows];  // each row's largest, and that of the eighth after it
    halves.for_each_row(is_e5m2, [&](int i, uint2 v) {
      uint32_t& row = rows[i % kRows];
      const uint32_t most = larger_magnitudes(v.x, v.y);
      row = i < kRows
                ? most
                : larger_magnitudes(__byte_perm(row, most, 0x5410), __byte_perm(row, most, 0x7632));
    });
    const float2 both = floats_of(largest_of_owned<Tile::kLanes>(rows, larger_magnitudes));
    if constexpr (Tile::kOwned == 2) {
      owned[0] = both.x * halves.unit;
      owned[1] = both.y * halves.unit;
    } else {
      owned[0] = ((threadIdx.x & kRows) != 0 ? both.y : both.x) * halves.unit;
    }
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
      owned[k] = multiplier_of<kScaling>(owned[k], scale.multiplier);
      const int i = Tile::owned_row(k);
      if (lane >= Tile::kTurn || i >= rows) continue;
      SpanScales<kScaling>::put(tile.first_row + i, tile.column, scale.scale);
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

  __device__ auto& all() { return reinterpret_cast<float(&)[kFour]>(four); }
  template <bool kSkipsNan, class Words, class IsE5m2>
  __device__ void take_largest(const Words& words, IsE5m2 is_e5m2) {
    four = {};
    words.for_each_row(is_e5m2, [&](int, const float(&v)[kFour]) {
      take_larger<kSkipsNan>({fabsf(v[0]), fabsf(v[1]), fabsf(v[2]), fabsf(v[3])});
    });
  }
  template <class Halves, class IsE5m2>
  __device__ void take_largest_halves(const Halves& halves, IsE5m2 is_e5m2) {
    uint2 most{};
    halves.for_each_row(is_e5m2, [&](int, uint2 v) {
      most = {larger_magnitudes(most.x, v.x), larger_magnitudes(most.y, v.y)};
    });
    const float2 a = floats_of(most.x), b = floats_of(most.y);
    const float unit = halves.unit;
    four = {a.x * unit, a.y * unit, b.x * unit, b.y * unit};
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
      reinterpret_cast<float*>(made)[t] = multiplier_of<Tile::kScaling>(amax, scale.multiplier);
      const int column = tile.first_column + static_cast<int>(t);
      auto* const row = static_cast<float*>(to.scales) + tile.index * to.scale_stride;
      if (column < columns) row[column] = scale.scale;
    }
    const bool is_odd = __syncthreads_or(!is_finite(amax)) != 0;
    four = made[lane];
    return kSkipsNan || !is_odd;
  }
};

}  // namespace moire::cuda::ops
