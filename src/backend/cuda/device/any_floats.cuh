// Matrices of FP32, BF16 or FP16 elements whose type is told apart at run time: a branch that all
// threads take alike, for kernels that do enough else to hide it.
#pragma once

#include <moire/tensor.h>

#include <cstdint>

#include "backend/cuda/device/values.cuh"

namespace moire::cuda {

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

}  // namespace moire::cuda
