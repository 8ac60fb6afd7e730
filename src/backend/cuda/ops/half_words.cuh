// Words of codes as pairs of FP16 numbers in units of the largest of a warp's scales, where these
// are powers of two so near each other that no bit of a value is lost: an instruction then takes
// two elements, and FP8 is encoded from FP16 as it is decoded to it. What becomes of an element is
// what its float would become: only what is less than half of either type's least number is rounded
// before that.
#pragma once

#include <type_traits>

#include "backend/cuda/ops/code_words.cuh"

namespace moire::cuda::ops {

// Two FP16 numbers.
__device__ inline uint32_t pair_of(float low, float high) {
  return bits_as<uint32_t>(__floats2half2_rn(low, high));
}
__device__ inline float2 floats_of(uint32_t pair) { return __half22float2(bits_as<__half2>(pair)); }
__device__ inline uint32_t product(uint32_t a, uint32_t b) {
  return bits_as<uint32_t>(__hmul2(bits_as<__half2>(a), bits_as<__half2>(b)));
}
__device__ inline uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
  return bits_as<uint32_t>(__hmax2_nan(__habs2(bits_as<__half2>(a)), __habs2(bits_as<__half2>(b))));
}

// A factor for each of a part's 16 rows, for both of its pairs. A lane has those of row `lane % 8`
// and of the eighth after it.
template <class Tile>
struct RowFactors {
  static constexpr int kRows = 8;
  static_assert(Tile::kRowsPerThread == 2 * kRows);
  uint32_t owned, lent;

  __device__ explicit RowFactors(const float (&factors)[Tile::kOwned]) {
    if constexpr (Tile::kOwned == 2) {
      owned = pair_of(factors[0], factors[1]);
    } else {
      const float other = __shfl_xor_sync(kAllLanes, factors[0], kRows);
      const bool is_upper = (threadIdx.x & kRows) != 0;
      owned = is_upper ? pair_of(other, factors[0]) : pair_of(factors[0], other);
    }
  }
  // NOTE: asked of a row, then of the eighth after it, which is lent with it. A warp calls it
  // together.
  __device__ uint2 of(int i) {
    if (i < kRows) lent = __shfl_sync(kAllLanes, owned, i, kRows);
    const auto both = bits_as<__half2>(lent);
    const auto one = bits_as<uint32_t>(i < kRows ? __low2half2(both) : __high2half2(both));
    return {one, one};
  }
};
// A factor for each of a thread's columns.
struct ColumnFactors {
  uint2 pairs;

  __device__ explicit ColumnFactors(const float (&factors)[kFour])
      : pairs{pair_of(factors[0], factors[1]), pair_of(factors[2], factors[3])} {}
  __device__ uint2 of(int) const { return pairs; }
};
template <class Tile, bool kIsColumnwise>
using HalfFactors = std::conditional_t<kIsColumnwise, ColumnFactors, RowFactors<Tile>>;

// A part's words, and what their pairs are multiplied by.
template <class Tile, bool kIsColumnwise_>
struct HalfWords {
  static constexpr bool kIsColumnwise = kIsColumnwise_;
  static constexpr int kRows = Tile::kRowsPerThread;
  using Words = PartWords<Tile, kIsColumnwise>;
  Words& words;    // their scales become those in `unit`: floats have to load them again
  float unit = 0;  // the largest; 0 where all values are

  // False where the scales do not allow it.
  __device__ bool take_unit(bool is_e5m2) {
    // E4M3's least number is 2^-9, E5M2's 2^-16, FP16's 2^-24.
    const uint32_t powers = is_e5m2 ? 8 : 15;
    if (!find_unit(powers)) {
      drop_scales_of_zeros();
      if (!find_unit(powers)) return false;
    }
    const float inverse = bit_cast<float>((254U << 23) - bit_cast<uint32_t>(unit));
#pragma unroll
    for (float& scale : words.scales) scale *= inverse;
    return true;
  }
  // Calls visit(i, the four values, in pairs) for each row and the eighth after it.
  template <class IsE5m2, class Visit>
  __device__ void for_each_row(IsE5m2 is_e5m2, Visit&& visit) const {
    HalfFactors<Tile, kIsColumnwise> factors(words.scales);
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int i = n / 2 + n % 2 * (kRows / 2);
      const uint2 v = decode_halves(words.words[i], is_e5m2.value);
      const uint2 factor = factors.of(i);
      visit(i, uint2{product(v.x, factor.x), product(v.y, factor.y)});
    }
  }

 private:
  // Whether the warp's scales, where they are not 0, are powers of two, `powers` apart at most, of
  // a size at which no float is subnormal or infinite.
  __device__ bool find_unit(uint32_t powers) {
    constexpr uint32_t kLow = 64U << 23, kHigh = 190U << 23;
    uint32_t least = ~0U, most = 0, some = 0;  // 0 comes last of the least
#pragma unroll
    for (const float scale : words.scales) {
      const uint32_t bits = bit_cast<uint32_t>(scale);
      least = min(least, bits - 1);
      most = max(most, bits);
      some |= bits;
    }
    if ((some & 0x7FFFFFU) != 0) least = 0;
    least = __reduce_min_sync(kAllLanes, least);
    most = __reduce_max_sync(kAllLanes, most);
    unit = bit_cast<float>(most);
    return most == 0 || (kLow <= most && most <= kHigh && most - 1 <= least + (powers << 23));
  }
  // A block of zeros may have any scale that is positive: others make NaN or -0 of it.
  __device__ void drop_scales_of_zeros() {
    const auto drop = [](float& scale, bool has_zeros) {
      if (has_zeros && bit_cast<uint32_t>(scale) < kInfinityBits) scale = 0;
    };
    if constexpr (kIsColumnwise) {
      uint32_t some = 0;
#pragma unroll
      for (const uint32_t word : words.words) some |= word;
#pragma unroll
      for (int j = 0; j < kFour; ++j) drop(words.scales[j], (some >> (8 * j) & 0x7FU) == 0);
    } else {
      const uint32_t lane = threadIdx.x % kWarp, first = lane / Tile::kLanes * Tile::kLanes;
      constexpr uint32_t kOfBlock = kAllLanes >> (kWarp - Tile::kLanes);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint32_t some = __ballot_sync(kAllLanes, (words.words[i] & 0x7F7F7F7FU) != 0);
        const bool is_mine = i % Tile::kTurn == static_cast<int>(lane) % Tile::kTurn;
        drop(words.scales[i / Tile::kTurn], is_mine && (some >> first & kOfBlock) == 0);
      }
    }
  }
};

// What a block of zeros is multiplied by, which may be anything: MXFP8's largest multiplier.
constexpr float kOfZeros = 0x1P127F;

// Turns multipliers of floats into factors of pairs in this unit. False, for the whole warp, where
// FP16 lacks one: a column's may be too small, as its largest number may be another warp's.
template <int kCount>
__device__ inline bool to_half_factors(float (&multipliers)[kCount], float unit) {
  constexpr uint32_t kLeast = (127U - 24) << 23, kMost = (127U + 15) << 23;  // 2^-24, 2^15
  bool fit = true;
#pragma unroll
  for (float& m : multipliers) {
    m = m == kOfZeros ? 1.0F : m * unit;
    fit = fit && bit_cast<uint32_t>(m) - kLeast <= kMost - kLeast;
  }
  return __all_sync(kAllLanes, fit || unit == 0) != 0;
}

}  // namespace moire::cuda::ops
