// Eight neighbouring elements in registers, as they are stored, and the largest of their
// magnitudes. A magnitude is the bits of |x| in x's own type, which order as the values do: NaN
// above infinity, or left out where kSkipsNan.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "backend/cuda/device/fp8.cuh"

namespace moire::cuda {

inline constexpr int kEight = 8;

template <class T>
struct Eight;

template <>
struct alignas(16) Eight<float> {
  static constexpr int kWords = 8;
  uint32_t words[kWords];

  __device__ float operator[](int i) const { return bit_cast<float>(words[i]); }
  __device__ void set(int i, float v) { words[i] = bit_cast<uint32_t>(v); }
};

// Of 16-bit types, in pairs.
template <class T>
struct alignas(16) Eight {
  static constexpr int kWords = 4;
  uint32_t words[kWords];

  __device__ float operator[](int i) const;
  __device__ void set(int i, T v) {
    const uint32_t bits = bits_as<uint16_t>(v);
    words[i / 2] =
        i % 2 == 0 ? (words[i / 2] & 0xFFFF0000U) | bits : (words[i / 2] & 0xFFFFU) | bits << 16;
  }
};
template <>
__device__ inline float Eight<__nv_bfloat16>::operator[](int i) const {
  return bit_cast<float>(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000U);
}
template <>
__device__ inline float Eight<__half>::operator[](int i) const {
  const __half2 pair = bits_as<__half2>(words[i / 2]);
  return i % 2 == 0 ? __low2float(pair) : __high2float(pair);
}

// Magnitudes as words hold them: one of FP32, two of 16-bit types.
template <class T>
struct Magnitudes;

template <>
struct Magnitudes<float> {
  using Bits = uint32_t;
  static constexpr int kPerWord = 1;

  __device__ static uint32_t of(uint32_t word) { return word & 0x7FFFFFFFU; }
  template <bool kSkipsNan>
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    if constexpr (!kSkipsNan) return max(a, b);
    return bit_cast<uint32_t>(fmaxf(bit_cast<float>(a), bit_cast<float>(b)));
  }
  // The largest of a word as the bits of a float.
  __device__ static uint32_t as_float(uint32_t word) { return word; }
  __device__ static float to_float(Bits bits) { return bit_cast<float>(bits); }
};

template <>
struct Magnitudes<__nv_bfloat16> {
  using Bits = uint16_t;
  static constexpr int kPerWord = 2;

  __device__ static uint32_t of(uint32_t word) { return word & 0x7FFF7FFFU; }
  template <bool kSkipsNan>
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    const auto x = bits_as<__nv_bfloat162>(a), y = bits_as<__nv_bfloat162>(b);
    return bits_as<uint32_t>(kSkipsNan ? __hmax2(x, y) : __hmax2_nan(x, y));
  }
  __device__ static uint32_t as_float(uint32_t word) { return max(word << 16, word & 0xFFFF0000U); }
  __device__ static float to_float(Bits bits) { return bit_cast<float>(uint32_t{bits} << 16); }
};

template <>
struct Magnitudes<__half> {
  using Bits = uint16_t;
  static constexpr int kPerWord = 2;

  __device__ static uint32_t of(uint32_t word) { return word & 0x7FFF7FFFU; }
  template <bool kSkipsNan>
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    const auto x = bits_as<__half2>(a), y = bits_as<__half2>(b);
    return bits_as<uint32_t>(kSkipsNan ? __hmax2(x, y) : __hmax2_nan(x, y));
  }
  __device__ static uint32_t as_float(uint32_t word) {
    const auto bits = static_cast<Bits>(max(word & 0xFFFFU, word >> 16));
    return bit_cast<uint32_t>(to_float(bits));
  }
  __device__ static float to_float(Bits bits) { return __half2float(bits_as<__half>(bits)); }
};

inline constexpr uint32_t kInfinityBits = 0x7F800000U;

// The largest magnitude of the eight, as the bits of a float; with NaN, at least infinity's, unless
// NaN are skipped.
template <bool kSkipsNan, class T>
__device__ inline uint32_t largest_of(const Eight<T>& x) {
  using M = Magnitudes<T>;
  uint32_t most = 0;
#pragma unroll
  for (const uint32_t word : x.words) most = M::template larger<kSkipsNan>(most, M::of(word));
  return M::as_float(most);
}

}  // namespace moire::cuda
