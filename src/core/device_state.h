// DeviceState: what is known of one device and what all contexts on it share. Built once, immutable
// afterwards.
#pragma once

#include <moire/context.h>

#include <memory>
#include <string>

#include "core/thread_pool.h"

namespace moire {

using OwnedMemory = std::unique_ptr<void, void (*)(void*)>;
struct DeviceState {
  DeviceState() = default;
  DeviceState(const DeviceState&) = delete;
  DeviceState& operator=(const DeviceState&) = delete;
  virtual ~DeviceState() = default;  // backends derive from it what only they need
  // Zeroed memory of the device; null where there is none. This is the host's.
  virtual OwnedMemory allocate(size_t bytes) const;

  Device device = Device::kCpu;
  int index = 0;
  bool is_planned = false;      // a description of a GPU: nothing runs on it
  std::string name;             // "AMD EPYC 7763" or "NVIDIA H200"
  int num_threads = 1;          // CPU
  std::string simd;             // CPU: the instruction set that kernels are dispatched to, "AVX2"
  int compute_capability = 0;   // CUDA: 10 * major + minor
  int num_multiprocessors = 0;  // CUDA
  int64_t memory_bytes = 0;     // CUDA
  std::unique_ptr<ThreadPool> pool;  // CPU
};

}  // namespace moire
