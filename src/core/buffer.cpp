#include <moire/buffer.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "core/sizes.h"

namespace moire {
namespace {
constexpr size_t kAlignment = 256;
}

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0 || bytes > SIZE_MAX - kAlignment) return;
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  data_.reset(std::aligned_alloc(kAlignment, rounded));
  if (data_ != nullptr) std::memset(data_.get(), 0, rounded);
}

void Buffer::Free::operator()(void* p) const { std::free(p); }

Tensor::Tensor(DType dtype, std::initializer_list<int64_t> shape) : view_(nullptr, dtype, shape) {
  // Sizes that are negative or past 63 bits are more than any memory.
  int64_t bytes = dtype_size(dtype);
  for (const int64_t size : shape) bytes = size < 0 ? kTooLarge : product(bytes, size);
  buffer_ = Buffer(bytes == kTooLarge ? SIZE_MAX : static_cast<size_t>(bytes));
  view_.data = buffer_.data();
}

}  // namespace moire
