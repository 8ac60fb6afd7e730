// CUDA devices: how many, what they are, and the first error that one reported.
#include "backend/device.h"

#include <cuda_runtime.h>

#include <string>

#include "core/format.h"

namespace moire::cuda {
namespace {

Status device_error(std::string_view call, cudaError_t error) {
  return {Code::kDevice, concat("context: ", call, " failed: ", cudaGetErrorString(error))};
}

Result<int> count() {
  int n = 0;
  const cudaError_t error = cudaGetDeviceCount(&n);
  if (error == cudaErrorNoDevice) return 0;
  if (error == cudaErrorInsufficientDriver) {
    return Status(
        Code::kUnsupported,
        "context: this machine has no NVIDIA driver for CUDA, or one older than this build needs");
  }
  if (error != cudaSuccess) return device_error("cudaGetDeviceCount", error);
  return n;
}

Result<std::unique_ptr<DeviceState>> open(const ContextOptions& options) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, options.index);
      error != cudaSuccess) {
    return device_error("cudaGetDeviceProperties", error);
  }
  auto state = std::make_unique<DeviceState>();
  state->device = Device::kCuda;
  state->index = options.index;
  state->name = properties.name;
  state->compute_capability = 10 * properties.major + properties.minor;
  return state;
}

Status check(const DeviceState&, void* stream) {
  const cudaError_t error = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? Status() : device_error("cudaStreamSynchronize", error);
}

}  // namespace

const DeviceKind kDevice = {count, open, check};

}  // namespace moire::cuda
