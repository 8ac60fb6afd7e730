// Arena: hands out 256-byte aligned pieces of a workspace. Over a null workspace it only measures,
// so that the same code sizes a workspace and carves it.
#pragma once

#include <moire/tensor.h>

#include <cstddef>

namespace moire {

class Arena {
 public:
  explicit Arena(Workspace workspace = {})
      : base_(static_cast<char*>(workspace.data)), bytes_(workspace.bytes) {}

  // `bytes` of memory; null when measuring.
  void* take(size_t bytes) {
    char* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  // A contiguous matrix.
  TensorView take(DType dtype, int64_t rows, int64_t columns) {
    const auto bytes = static_cast<size_t>(rows * columns * dtype_size(dtype));
    return TensorView(take(bytes), dtype, {rows, columns});
  }
  size_t used() const { return used_; }
  // What has not been handed out.
  Workspace rest() const {
    return {base_ == nullptr ? nullptr : base_ + used_, bytes_ < used_ ? 0 : bytes_ - used_};
  }

 private:
  static constexpr size_t kAlignment = 256;
  char* base_;
  size_t bytes_;
  size_t used_ = 0;
};

}  // namespace moire
