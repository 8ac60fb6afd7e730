// A tensor's rows as kernels address them.
#pragma once

#include <moire/tensor.h>

namespace moire::cuda {

// Rows of Ts, `stride` elements apart; absent where data is null.
template <class T>
struct Matrix {
  T* data;
  int64_t stride;

  __host__ __device__ bool is_present() const { return data != nullptr; }
  __device__ T* row(int64_t i) const { return data + i * stride; }
};

// A vector, or null where it is absent.
template <class T>
T* vector_of(const TensorView& t) {
  return t.is_present() ? static_cast<T*>(t.data) : nullptr;
}

template <class T>
Matrix<T> matrix_of(const TensorView& t) {
  return {vector_of<T>(t), t.num_rows() <= 1 ? 0 : t.stride()};  // vectors begin at all rows
}

}  // namespace moire::cuda
