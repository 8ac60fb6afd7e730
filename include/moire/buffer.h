// Buffer: owning memory for callers who want comfort; no op needs it.
#pragma once

#include <moire/context.h>
#include <moire/groups.h>
#include <moire/tensor.h>

#include <memory>

namespace moire {

// 256-byte aligned memory, zeroed; movable. Empty when the allocation failed (ok() tells) or bytes
// was 0.
class MOIRE_API Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  Buffer(const Context& context, size_t bytes);  // of the context's device

  void* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }
  bool ok() const { return bytes_ == 0 || data_ != nullptr; }
  Workspace workspace() const { return {data_.get(), bytes_}; }

 private:
  std::unique_ptr<void, void (*)(void*)> data_{nullptr, nullptr};
  size_t bytes_ = 0;
};

// A contiguous tensor and its memory.
class MOIRE_API Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::initializer_list<int64_t> shape);

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(buffer_.data());
  }
  size_t bytes() const { return buffer_.bytes(); }
  // False where there was no memory, or the shape is of none.
  bool ok() const { return buffer_.ok(); }

 private:
  Buffer buffer_;
  TensorView view_;
};

}  // namespace moire
