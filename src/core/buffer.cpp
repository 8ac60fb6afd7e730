#include <moire/buffer.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "core/device_state.h"
#include "core/sizes.h"

namespace moire {

OwnedMemory DeviceState::allocate(size_t bytes) const {
  constexpr size_t kAlignment = 256;
  if (is_planned || bytes == 0 || bytes > SIZE_MAX - kAlignment) return {nullptr, std::free};
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* const memory = std::aligned_alloc(kAlignment, rounded);
  return {memory == nullptr ? nullptr : std::memset(memory, 0, rounded), std::free};
}

Buffer::Buffer(size_t bytes) : data_(DeviceState().allocate(bytes)), bytes_(bytes) {}
Buffer::Buffer(const Context& context, size_t bytes)
    : data_(context.state().allocate(bytes)), bytes_(bytes) {}

Tensor::Tensor(DType dtype, std::initializer_list<int64_t> shape) : view_(nullptr, dtype, shape) {
  // Sizes that are negative or past 63 bits are more than any memory.
  int64_t bytes = dtype_size(dtype);
  for (const int64_t size : shape) bytes = size < 0 ? kTooLarge : product(bytes, size);
  buffer_ = Buffer(bytes == kTooLarge ? SIZE_MAX : static_cast<size_t>(bytes));
  view_.data = buffer_.data();
}

}  // namespace moire
