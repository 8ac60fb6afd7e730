#include "staging/device_memory.h"

#include <cuda_runtime.h>

#include <string>

namespace moire::staging {
namespace {

Status check(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {error == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kDevice,
          std::string("staging: ") + call + " failed: " + cudaGetErrorString(error)};
}

Status copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
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

DeviceMemory::~DeviceMemory() { cudaFree(data_); }

Status DeviceMemory::reserve(size_t bytes) {
  if (bytes <= bytes_) return {};
  if (Status status = check("cudaFree", cudaFree(data_)); !status.ok()) return status;
  data_ = nullptr;
  bytes_ = 0;
  void* memory = nullptr;
  if (Status status = check("cudaMalloc", cudaMalloc(&memory, bytes)); !status.ok()) return status;
  data_ = static_cast<std::byte*>(memory);
  bytes_ = bytes;
  return {};
}

Status copy_to_device(std::byte* device, const std::byte* host, size_t bytes) {
  return copy(device, host, bytes, cudaMemcpyHostToDevice);
}

Status copy_to_host(std::byte* host, const std::byte* device, size_t bytes) {
  return copy(host, device, bytes, cudaMemcpyDeviceToHost);
}

}  // namespace moire::staging
