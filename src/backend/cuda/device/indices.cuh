// Indices on the device: either width, and never trusted.
#pragma once

#include <moire/tensor.h>

#include "backend/cuda/device/report.cuh"

namespace moire::cuda {

// INT32 or INT64, told apart at run time: a branch that all threads take alike.
struct Indices {
  const void* data;  // null where absent
  int64_t stride;    // from one row to the next
  bool is_int64;
  const char* name;  // a literal, for findings

  __host__ __device__ bool is_present() const { return data != nullptr; }
  __device__ int64_t at(int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  __device__ int64_t at(int64_t row, int64_t column) const { return at(row * stride + column); }
};

inline Indices indices_of(const TensorView& t, const char* name) {
  return {t.is_present() ? t.data : nullptr, t.stride(), t.type() == DType::kInt64, name};
}

// `value` where it is below `limit`, else -1, which stands for an entry to be skipped. Entry
// `index` is reported if it is none of -1 (where that is allowed) and 0 ... limit - 1.
enum class Dropping { kAllowed, kForbidden };
__device__ inline int64_t checked_index(const Indices& indices, int64_t index, int64_t value,
                                        int64_t limit, Dropping dropping,
                                        const Reporter& reporter) {
  if (value >= 0 && value < limit) return value;
  if (value != -1 || dropping == Dropping::kForbidden) {
    report(reporter, Finding::kIndexOutside, index, value, limit, indices.name);
  }
  return -1;
}

}  // namespace moire::cuda
