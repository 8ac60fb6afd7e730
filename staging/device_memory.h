// Memory of a CUDA device, for callers that have none of the CUDA run-time's headers. Without a
// CUDA build every function says so.
#pragma once

#include <moire/status.h>

#include <cstddef>

namespace moire::staging {

// Grows on demand and is freed at the end; nothing in it moves while it is large enough.
class DeviceMemory {
 public:
  // kHost: memory of the host that kernels reach, for what is copied while some of them wait: the
  // host reads and writes it itself.
  enum class Kind { kDevice, kHost };
  explicit DeviceMemory(Kind kind = Kind::kDevice) : kind_(kind) {}
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // At least so many bytes, 256-byte aligned; what was in it may be lost.
  Status reserve(size_t bytes);
  std::byte* data() const { return data_; }
  // Of its first bytes; what the device was given before is done, or, on the host, the caller's to
  // wait for.
  Status write(const std::byte* from, size_t bytes) const;
  Status read(std::byte* to, size_t bytes) const;

 private:
  Kind kind_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Ranks are spread over the devices that there are, one after the other.
inline constexpr int kMostRanksOnDevices = 16;
int device_of_rank(int rank);
// A stream for each rank, on its device, where those that share it wait for each other: made
// together and kept, since a stream that comes after others have gone may get the hardware queue of
// one that waits. There are 32 queues, unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise.
void* stream_of_rank(int rank);
// An error is the next call's to say.
void wait_for(void* stream);

// Both wait for everything that the device of that memory was given before, and for the copy.
Status copy_to_device(std::byte* device, const std::byte* host, size_t bytes);
Status copy_to_host(std::byte* host, const std::byte* device, size_t bytes);

}  // namespace moire::staging
