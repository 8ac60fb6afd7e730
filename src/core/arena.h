// Arena: hands out 256-byte aligned pieces of a workspace. Over a null workspace it only measures,
// so that the same code sizes a workspace and carves it. Pieces past the workspace's end are null,
// and sizes past 63 bits stay there (core/sizes.h): the check of used() comes before any use.
#pragma once

#include <moire/tensor.h>

#include <cstddef>
#include <cstdint>

#include "core/divide.h"
#include "core/sizes.h"

namespace moire {

class Arena {
 public:
  explicit Arena(Workspace workspace = {})
      : base_(static_cast<char*>(workspace.data)), bytes_(workspace.bytes) {}

  // `bytes` of memory; null when measuring.
  void* take(int64_t bytes) {
    char* const piece = at_used();
    used_ = sum(used_, product(ceil_div(bytes, kAlignment), kAlignment));
    return used() > bytes_ ? nullptr : piece;
  }
  // A contiguous matrix.
  TensorView take(DType dtype, int64_t rows, int64_t columns) {
    return TensorView(take(product(rows, columns, dtype_size(dtype))), dtype, {rows, columns});
  }
  // A matrix whose rows start on 16 bytes.
  TensorView take_aligned(DType dtype, int64_t rows, int64_t columns) {
    const int64_t stride = round_up(columns, 16 / dtype_size(dtype));
    return TensorView(take(dtype, rows, stride).data, dtype, {rows, columns}, stride);
  }
  float* take_floats(int64_t rows, int64_t columns) {
    return static_cast<float*>(take(DType::kFP32, rows, columns).data);
  }
  size_t used() const { return static_cast<size_t>(used_); }
  // What has not been handed out.
  Workspace rest() const { return {at_used(), bytes_ < used() ? 0 : bytes_ - used()}; }

 private:
  char* at_used() const { return base_ == nullptr || used() > bytes_ ? nullptr : base_ + used_; }

  static constexpr int64_t kAlignment = 256;
  char* base_;
  size_t bytes_;
  int64_t used_ = 0;
};

}  // namespace moire
