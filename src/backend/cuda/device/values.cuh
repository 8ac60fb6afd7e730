// Elements of the storage types as floats, one at a time or 16 bytes at once. Which of the two is
// the host's decision (opens_vectors); kernels are templates of the type and of the elements that
// they take at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <moire/tensor.h>

#include <cstring>
#include <type_traits>
#include <utility>

namespace moire::cuda {

// bit_cast for CUDA's own types, which are not trivially copyable.
template <class To, class From>
__device__ inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline float to_float(__half v) { return __half2float(v); }

// To nearest even; every NaN becomes 0x7FFF in 16 bits.
template <class T>
__device__ inline T from_float(float v) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(v);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(v);
  } else {
    return v;
  }
}

inline constexpr int kVectorBytes = 16;
template <class T>
inline constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));

// N elements in as few loads or stores as there are.
template <class T, int N>
struct alignas(sizeof(T) * N < kVectorBytes ? sizeof(T) * N : kVectorBytes) Packed {
  T values[N];

  __device__ float operator[](int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
      // The upper half of a word is a float but for the lower one: an instruction instead of two.
      uint32_t word;
      memcpy(&word, &values[i / 2 * 2], sizeof(word));
      return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xFFFF0000U);
    } else {
      return to_float(values[i]);
    }
  }
  __device__ void set(int i, float v) { values[i] = from_float<T>(v); }
  // Neighbours from an even one on, as far as they are there, in one instruction where that exists.
  __device__ void set_two(int i, float first, float second) {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N > 1) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(first, second);
      memcpy(&values[i], &two, sizeof(two));
    } else {
      set(i, first);
      if constexpr (N > 1) set(i + 1, second);
    }
  }
};

template <int N, class T>
__device__ inline Packed<T, N> load(const T* p) {
  return *reinterpret_cast<const Packed<T, N>*>(p);
}
template <int N, class T>
__device__ inline void store(T* p, const Packed<T, N>& v) {
  *reinterpret_cast<Packed<T, N>*>(p) = v;
}

// Whether every row of these tensors starts on 16 bytes; absent ones do.
inline bool opens_vectors(std::initializer_list<TensorView> tensors) {
  for (const TensorView& t : tensors) {
    if (!t.is_present()) continue;
    const bool is_aligned = reinterpret_cast<uintptr_t>(t.data) % kVectorBytes == 0;
    const bool fits = t.num_rows() <= 1 || t.stride() * dtype_size(t.type()) % kVectorBytes == 0;
    if (!is_aligned || !fits) return false;
  }
  return true;
}

// A matrix of FP32, BF16 or FP16 elements whose type is told apart at run time: a branch that all
// threads take alike, for kernels that do enough else to hide it.
struct AnyFloats {
  void* data;  // null where absent
  int64_t stride;
  DType dtype;

  __host__ __device__ bool is_present() const { return data != nullptr; }

  __device__ float at(int64_t row, int64_t column) const {
    const int64_t i = row * stride + column;
    if (dtype == DType::kBF16) return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
    if (dtype == DType::kFP16) return to_float(static_cast<const __half*>(data)[i]);
    return static_cast<const float*>(data)[i];
  }
  __device__ void set(int64_t row, int64_t column, float v) const {
    const int64_t i = row * stride + column;
    if (dtype == DType::kBF16) {
      static_cast<__nv_bfloat16*>(data)[i] = from_float<__nv_bfloat16>(v);
    } else if (dtype == DType::kFP16) {
      static_cast<__half*>(data)[i] = from_float<__half>(v);
    } else {
      static_cast<float*>(data)[i] = v;
    }
  }
  // What reading a stored v gives.
  __device__ float rounded(float v) const {
    if (dtype == DType::kBF16) return to_float(from_float<__nv_bfloat16>(v));
    if (dtype == DType::kFP16) return to_float(from_float<__half>(v));
    return v;
  }
};

inline AnyFloats any_floats(const TensorView& t) {
  return {t.is_present() ? t.data : nullptr, t.stride(), t.type()};
}

// Calls f with the flag as a constant. Where f is a warp's, so is the flag.
template <class F>
__device__ inline void with_flag(bool flag, F&& f) {
  flag ? f(std::true_type()) : f(std::false_type());
}

// Calls f.operator()<T>() with the type of FP32, BF16 or FP16 elements; on the host.
template <class F>
decltype(auto) with_float_type(DType dtype, F&& f) {
  if (dtype == DType::kBF16) return std::forward<F>(f).template operator()<__nv_bfloat16>();
  if (dtype == DType::kFP16) return std::forward<F>(f).template operator()<__half>();
  return std::forward<F>(f).template operator()<float>();
}
// The same for INT32 and INT64.
template <class F>
decltype(auto) with_index_type(DType dtype, F&& f) {
  if (dtype == DType::kInt32) return std::forward<F>(f).template operator()<int32_t>();
  return std::forward<F>(f).template operator()<int64_t>();
}

}  // namespace moire::cuda
