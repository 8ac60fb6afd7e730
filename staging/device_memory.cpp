#include "staging/device_memory.h"

#include <cuda_runtime.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace moire::staging {
namespace {

// Ranks that share a device need a queue each: said before anything opens CUDA, which reads it
// then.
[[maybe_unused]] const bool has_queues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) == 0;

Status check(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {error == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kDevice,
          std::string("staging: ") + call + " failed: " + cudaGetErrorString(error)};
}

// While it lives, calls of this thread are on the device that has this memory.
class DeviceOf {
 public:
  explicit DeviceOf(const void* memory) {
    cudaPointerAttributes found{};
    cudaGetDevice(&before_);
    if (cudaPointerGetAttributes(&found, memory) == cudaSuccess) cudaSetDevice(found.device);
  }
  ~DeviceOf() { cudaSetDevice(before_); }
  DeviceOf(const DeviceOf&) = delete;
  DeviceOf& operator=(const DeviceOf&) = delete;

 private:
  int before_ = 0;
};

Status copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const DeviceOf current(kind == cudaMemcpyHostToDevice ? to : from);
  if (Status status = check("cudaDeviceSynchronize", cudaDeviceSynchronize()); !status.ok()) {
    return status;
  }
  if (Status status = check("cudaMemcpy", cudaMemcpy(to, from, bytes, kind)); !status.ok()) {
    return status;
  }
  // A small copy to the device may be on its way still, and not every stream waits for it.
  return check("cudaDeviceSynchronize", cudaDeviceSynchronize());
}

}  // namespace

DeviceMemory::~DeviceMemory() { kind_ == Kind::kHost ? cudaFreeHost(data_) : cudaFree(data_); }

Status DeviceMemory::reserve(size_t bytes) {
  if (bytes <= bytes_) return {};
  const bool on_host = kind_ == Kind::kHost;
  if (Status status = check("cudaFree", on_host ? cudaFreeHost(data_) : cudaFree(data_));
      !status.ok()) {
    return status;
  }
  data_ = nullptr;
  bytes_ = 0;
  void* memory = nullptr;
  const cudaError_t error =
      on_host ? cudaHostAlloc(&memory, bytes, cudaHostAllocMapped) : cudaMalloc(&memory, bytes);
  if (Status status = check("cudaMalloc", error); !status.ok()) return status;
  data_ = static_cast<std::byte*>(memory);
  bytes_ = bytes;
  return {};
}

Status DeviceMemory::write(const std::byte* from, size_t bytes) const {
  if (kind_ == Kind::kDevice) return copy_to_device(data_, from, bytes);
  std::memcpy(data_, from, bytes);
  return {};
}

Status DeviceMemory::read(std::byte* to, size_t bytes) const {
  if (kind_ == Kind::kDevice) return copy_to_host(to, data_, bytes);
  std::memcpy(to, data_, bytes);
  return {};
}

int device_of_rank(int rank) {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 ? rank % devices : 0;
}

void* stream_of_rank(int rank) {
  static const auto streams = [] {
    std::array<cudaStream_t, kMostRanksOnDevices> out{};
    int before = 0;
    cudaGetDevice(&before);
    for (int r = 0; r < kMostRanksOnDevices; ++r) {
      cudaError_t error = cudaSetDevice(device_of_rank(r));
      auto& stream = out[static_cast<size_t>(r)];
      if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
    }
    cudaSetDevice(before);
    return out;
  }();
  return streams.at(static_cast<size_t>(rank));
}

void wait_for(void* stream) { cudaStreamSynchronize(static_cast<cudaStream_t>(stream)); }

Status copy_to_device(std::byte* device, const std::byte* host, size_t bytes) {
  return copy(device, host, bytes, cudaMemcpyHostToDevice);
}

Status copy_to_host(std::byte* host, const std::byte* device, size_t bytes) {
  return copy(host, device, bytes, cudaMemcpyDeviceToHost);
}

}  // namespace moire::staging
