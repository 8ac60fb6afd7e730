#include <moire/buffer.h>

#include <cstdlib>
#include <cstring>

namespace moire {
namespace {
constexpr size_t kAlignment = 256;
}

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  data_.reset(std::aligned_alloc(kAlignment, rounded));
  if (data_ != nullptr) std::memset(data_.get(), 0, rounded);
}

void Buffer::Free::operator()(void* p) const { std::free(p); }

Tensor::Tensor(DType dtype, std::initializer_list<int64_t> shape) : view_(nullptr, dtype, shape) {
  buffer_ = Buffer(static_cast<size_t>(view_.num_elements() * dtype_size(dtype)));
  view_.data = buffer_.data();
}

}  // namespace moire
