// What quantize's kernel writes: the elements of a tile's rows as codes or as values, in the way
// that their blocks allow.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "backend/cuda/ops/quantize_tiles.cuh"

namespace moire::cuda::ops {

// One quantised copy; absent where data is null. Of MXFP8 it is values, BF16, without scales.
struct CopyTarget {
  uint8_t* data;
  int64_t stride;  // bytes
  void* scales;
  int64_t scale_stride;
  int64_t scale_step;  // between the FP32 scales of a row's blocks, which may lie turned over
  int64_t scale_rows;
  bool is_e5m2;
  bool is_transposed;    // core/scale_shapes.h
  bool has_e8m0_scales;  // beside a folded copy, too

  __host__ __device__ bool is_present() const { return data != nullptr; }
  // What lies so many rows further.
  void skip(int64_t rows, int64_t rows_of_scales, DType of_scales) {
    if (!is_present()) return;
    data += rows * stride;
    scales = static_cast<char*>(scales) + rows_of_scales * scale_stride * dtype_size(of_scales);
  }
  template <int kScaling>
  __device__ bool is_values() const {
    return kScaling == MOIRE_SCALING_MXFP8 && scales == nullptr;
  }
  template <int kScaling>
  __device__ int element_bytes() const {
    return is_values<kScaling>() ? 2 : 1;
  }
};

template <class Source>
struct QuantizeTiles {
  static constexpr bool kIsPlain = std::is_same_v<Source, PlainRows>;
  Source source;
  ScaleBlocks blocks;
  CopyTarget rowwise, columnwise;  // FP8_TILE: rowwise alone
  int64_t capacity;                // rows of the copies
  uint32_t column_tiles;           // of a row; or, of blocks that have several tiles,
  TileSpans spans;
  bool has_fractional_scales, zeroes_tail;

  __device__ bool is_fractional() const { return !kIsPlain && has_fractional_scales; }
};

__device__ inline float first_of(float multiplier) { return multiplier; }
__device__ inline float first_of(const FoldedMultiplier& multiplier) {
  return bit_cast<float>(multiplier.bits & 0xFFFF0000U);
}
// Eight values times what they are multiplied by, first, as codes; perhaps folded.
template <class T, class Multiplier>
__device__ inline void encode_eight(uint32_t (&codes)[2], const Eight<T>& values, bool is_e5m2,
                                    Multiplier&& multiplier) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto scaled = [&](int j) { return values[4 * i + j] * first_of(multiplier(4 * i + j)); };
    codes[i] = encode_four(scaled(0), scaled(1), scaled(2), scaled(3), is_e5m2);
    if constexpr (!std::is_same_v<decltype(multiplier(0)), float>) {
      codes[i] = fold_four(codes[i], is_e5m2, [&](int j) {
        const int k = 4 * i + j;
        return __byte_perm(multiplier(k).bits, multiplier(k + 1).bits, 0x5410);
      });
    }
  }
}

// Bytes in words, of which so many columns are left.
template <bool kVectors, int kWords>
__device__ inline void store_bytes(uint8_t* p, int columns_left, const uint32_t (&words)[kWords]) {
  if constexpr (kVectors && kWords == 2) {
    *reinterpret_cast<uint2*>(p) = {words[0], words[1]};
  } else if constexpr (kVectors) {
    static_assert(kWords == 1);
    *reinterpret_cast<uint32_t*>(p) = words[0];
  } else {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
      if (i < columns_left) p[i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
    }
  }
}
// Eight values of 16 bits.
template <bool kVectors>
__device__ inline void store_values(uint8_t* p, int columns_left, const uint32_t (&words)[4]) {
  if constexpr (kVectors) {
    *reinterpret_cast<uint4*>(p) = {words[0], words[1], words[2], words[3]};
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (i >= columns_left) continue;
      reinterpret_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
    }
  }
}

// What eight values become as E4M3, in BF16.
template <class T, class Multiplier>
__device__ inline void values_of_codes(uint32_t (&words)[4], const Eight<T>& values,
                                       Multiplier&& multiplier) {
  uint32_t codes[2];
  encode_eight(codes, values, false, multiplier);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const float4 v = decode_four(codes[i / 2], false);
    const auto word = [&](int j, float a, float b) {
      return bits_as<uint32_t>(
          __floats2bfloat162_rn(a * mx_scale_of_multiplier(multiplier(2 * j)),
                                b * mx_scale_of_multiplier(multiplier(2 * j + 1))));
    };
    words[i] = word(i, v.x, v.y);
    words[i + 1] = word(i + 1, v.z, v.w);
  }
}

// A part's rows.
template <int kScaling, class Source>
using Rows = typename Source::template Rows<TileShape<kScaling>::kRowsPerThread>;

// Two ways to quantise a tile: quickly, by packed arithmetic on 16 bits, which leaves alone what
// that cannot do; and any tile.
enum class Way { kQuick, kAny };
// What was met.
enum : uint32_t { kIsOdd = 1, kIsLeft = 2 };  // infinity or NaN; a copy that is left

// Whether such rows become values and never codes.
template <class Values>
constexpr bool kBecomeValues = requires {
  Values::kBecomeValues;
};

// Whether values of such rows are rounded as BF16.
template <Way kWay, class Values>
constexpr bool kRoundsValues =
    (kWay == Way::kQuick) && std::is_same_v<ElementOf<Values>, __nv_bfloat16>;

// Whether a copy has to be left to the other way.
template <Way kWay, int kScaling, class Values>
__device__ inline bool is_left(const CopyTarget& to, const Largest& largest) {
  if constexpr (!kRoundsValues<kWay, Values>) return false;
  return to.is_values<kScaling>() && __any_sync(kAllLanes, !largest.lie_in(-100, 100));
}

// A part's rows as codes or values; `multiplier(i, j)` is that of column j of row i.
template <Way kWay, int kScaling, class Source, class Values, class Multiplier>
__device__ inline void store_rows(const QuantizeTiles<Source>& args, const TilePart<kScaling>& tile,
                                  const CopyTarget& to, const Values& values,
                                  Multiplier&& multiplier) {
  if (!tile.has_row(0)) return;
  constexpr bool kVectors = Source::kVectors;
  const int left = args.source.columns - tile.column;
  uint8_t* const first =
      to.data + tile.row(0) * to.stride + tile.column * to.element_bytes<kScaling>();
  const auto for_each_row = [&](auto store) {
    uint8_t* p = first;
#pragma unroll
    for (int i = 0; i < TilePart<kScaling>::kRows; ++i) {
      store(p, i, values[i], [&](int j) { return multiplier(i, j); });
      p += to.stride;
    }
  };
  if constexpr (kScaling == MOIRE_SCALING_MXFP8) {
    if (kBecomeValues<Values> || to.is_values<kScaling>()) {
      for_each_row([&](uint8_t* p, int i, const auto& row, const auto& of_column) {
        uint32_t words[4];
        if constexpr (kRoundsValues<kWay, Values>) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint32_t least = least_normals(of_column(2 * j), of_column(2 * j + 1));
            words[j] = rounded_to_e4m3(row.words[j], least);
          }
        } else {
          values_of_codes(words, row, of_column);
        }
        if (tile.has_row(i)) store_values<kVectors>(p, left, words);
      });
      return;
    }
  }
  with_flag(to.is_e5m2, [&](auto is_e5m2) {
    for_each_row([&](uint8_t* p, int i, const auto& row, const auto& of_column) {
      uint32_t codes[2];
      encode_eight(codes, row, is_e5m2.value, of_column);
      if (tile.has_row(i)) store_bytes<kVectors>(p, left, codes);
    });
  });
}

}  // namespace moire::cuda::ops
