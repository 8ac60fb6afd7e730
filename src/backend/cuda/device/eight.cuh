// Eight neighbouring elements in registers, as they are stored, and the largest of their
// magnitudes. A magnitude is the bits of |x| in x's own type, which order as the values do: NaN
// above infinity, or left out where kSkipsNan.
#pragma once

#include "backend/cuda/device/fp8.cuh"

namespace moire::cuda {

inline constexpr int kEight = 8;

template <class T>
struct Eight;

template <>
struct alignas(16) Eight<float> {
  using Element = float;
  static constexpr int kWords = 8;
  uint32_t words[kWords];

  __device__ float operator[](int i) const { return bit_cast<float>(words[i]); }
  __device__ void set(int i, float v) { words[i] = bit_cast<uint32_t>(v); }
};

// Of 16-bit types, in pairs.
template <class T>
struct alignas(16) Eight {
  using Element = T;
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
  template <bool kSkipsNan>
  __device__ static uint32_t larger_element(uint32_t a, uint32_t b) {
    return larger<kSkipsNan>(of(a), of(b));
  }
  __device__ static float to_float(Bits bits) { return bit_cast<float>(bits); }
};

template <class Pair>
struct Magnitudes16 {
  using Bits = uint16_t;
  static constexpr int kPerWord = 2;

  __device__ static uint32_t of(uint32_t word) { return word & 0x7FFF7FFFU; }
  template <bool kSkipsNan>
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    const auto x = bits_as<Pair>(a), y = bits_as<Pair>(b);
    return bits_as<uint32_t>(kSkipsNan ? __hmax2(x, y) : __hmax2_nan(x, y));
  }
  // Of elements instead of magnitudes, with some sign, which of() leaves out: an instruction less.
  template <bool kSkipsNan>
  __device__ static uint32_t larger_element(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    uint32_t most;
    if constexpr (std::is_same_v<Pair, __half2>) {
      if constexpr (kSkipsNan) {
        asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
      } else {
        asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
      }
    } else if constexpr (kSkipsNan) {
      asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    } else {
      asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    }
    return most;
#else
    return larger<kSkipsNan>(of(a), of(b));
#endif
  }
};
template <>
struct Magnitudes<__nv_bfloat16> : Magnitudes16<__nv_bfloat162> {
  __device__ static float to_float(Bits bits) { return bit_cast<float>(uint32_t{bits} << 16); }
};
template <>
struct Magnitudes<__half> : Magnitudes16<__half2> {
  __device__ static float to_float(Bits bits) { return __half2float(bits_as<__half>(bits)); }
};

inline constexpr uint32_t kInfinityBits = 0x7F800000U;

// The largest magnitudes of a row's words, in all of their places.
template <bool kSkipsNan, class T>
__device__ inline uint32_t largest_word(const Eight<T>& row) {
  using M = Magnitudes<T>;
  uint32_t most = kSkipsNan ? 0 : row.words[0];
#pragma unroll
  for (int i = kSkipsNan ? 0 : 1; i < Eight<T>::kWords; ++i) {
    most = M::template larger_element<kSkipsNan>(most, row.words[i]);
  }
  return M::of(most);
}

// What rows of eight, an array of them or what looks like one, consist of.
template <class Rows>
using ElementOf = typename std::remove_cvref_t<decltype(std::declval<const Rows&>()[0])>::Element;

// The largest magnitudes of rows of eight from `first` on, of as many as a word holds.
template <bool kSkipsNan, class Rows>
__device__ inline uint32_t largest_of_word(const Rows& rows, int first) {
  using M = Magnitudes<ElementOf<Rows>>;
  uint32_t most = largest_word<kSkipsNan>(rows[first]);
  if constexpr (M::kPerWord == 2) {
    const uint32_t next = largest_word<kSkipsNan>(rows[first + 1]);
    most = M::template larger<kSkipsNan>(__byte_perm(most, next, 0x5410),
                                         __byte_perm(most, next, 0x7632));
  }
  return most;
}

// The largest magnitudes of rows of eight among `kLanes` neighbouring lanes, as floats. A warp
// calls it together.
template <bool kSkipsNan, int kLanes, class Rows, int kRows>
__device__ inline void largest_of_rows(const Rows& rows, float (&amax)[kRows]) {
  using M = Magnitudes<ElementOf<Rows>>;
  static_assert(kRows % M::kPerWord == 0);
#pragma unroll
  for (int i = 0; i < kRows; i += M::kPerWord) {
    uint32_t most = largest_of_word<kSkipsNan>(rows, i);
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      most = M::template larger<kSkipsNan>(most, __shfl_xor_sync(0xFFFFFFFFU, most, lanes));
    }
#pragma unroll
    for (int j = 0; j < M::kPerWord; ++j) {
      amax[i + j] = M::to_float(static_cast<typename M::Bits>(most >> (16 * j)));
    }
  }
}

// Of kItems things, whose largest magnitudes in this lane `words` holds, those of one among kLanes
// neighbouring lanes, as a float: lane i has it of the i-th, as each exchange leaves it half of
// them. A warp calls it together.
template <bool kSkipsNan, int kItems, int kLanes, class T, int kWords>
__device__ inline float largest_of_own(uint32_t (&words)[kWords]) {
  using M = Magnitudes<T>;
  static_assert(kWords * M::kPerWord == kItems && kLanes >= kItems);
  const auto exchange = [&](uint32_t& keeps, uint32_t gives, int lanes) {
    keeps = M::template larger<kSkipsNan>(keeps, __shfl_xor_sync(0xFFFFFFFFU, gives, lanes));
  };
  int left = kWords;
#pragma unroll
  for (int lanes = kItems / 2; lanes > 0; lanes /= 2) {
    if (left == 1) {
      exchange(words[0], words[0], lanes);
      continue;
    }
    left /= 2;
    const bool has_upper = (threadIdx.x & lanes) != 0;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const uint32_t low = words[i], high = words[i + left];
      words[i] = has_upper ? high : low;
      exchange(words[i], has_upper ? low : high, lanes);
    }
  }
#pragma unroll
  for (int lanes = kItems; lanes < kLanes; lanes *= 2) exchange(words[0], words[0], lanes);
  const uint32_t shift = M::kPerWord == 2 ? threadIdx.x % 2 * 16 : 0;
  return M::to_float(static_cast<typename M::Bits>(words[0] >> shift));
}

// The largest magnitude of one of four rows of eight among kLanes neighbouring lanes: lane i has
// the i-th's.
template <bool kSkipsNan, int kLanes, class Rows>
__device__ inline float largest_of_own_row(const Rows& rows) {
  using T = ElementOf<Rows>;
  constexpr int kPerWord = Magnitudes<T>::kPerWord;
  uint32_t words[4 / kPerWord];
#pragma unroll
  for (int i = 0; i < 4; i += kPerWord) words[i / kPerWord] = largest_of_word<kSkipsNan>(rows, i);
  return largest_of_own<kSkipsNan, 4, kLanes, T>(words);
}

}  // namespace moire::cuda
