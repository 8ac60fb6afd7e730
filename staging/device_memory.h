// Memory of a CUDA device, for callers that have none of the CUDA run-time's headers. Without a
// CUDA build every function says so.
#pragma once

#include <moire/status.h>

#include <cstddef>

namespace moire::staging {

// Grows on demand and is freed at the end; nothing in it moves while it is large enough.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // At least so many bytes, 256-byte aligned; what was in it may be lost.
  Status reserve(size_t bytes);
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Both wait for everything that the device was given before, and for the copy.
Status copy_to_device(std::byte* device, const std::byte* host, size_t bytes);
Status copy_to_host(std::byte* host, const std::byte* device, size_t bytes);

}  // namespace moire::staging
