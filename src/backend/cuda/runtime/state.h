// CudaState: one CUDA device as its contexts share it, and the first error that its kernels found.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <atomic>
#include <mutex>

#include "backend/cuda/device/non_finite.cuh"
#include "backend/cuda/device/report.cuh"
#include "backend/cuda/runtime/grants.h"
#include "backend/cuda/runtime/tile_counters.h"
#include "core/device_state.h"

namespace moire::cuda {

struct CudaState : DeviceState {
  ~CudaState() override { cudaFreeHost(record); }
  OwnedMemory allocate(size_t bytes) const override;

  PFN_cuTensorMapEncodeTiled_v12000 encode_tensor_map = nullptr;  // null below sm_90
  ErrorRecord* record = nullptr;                                  // pinned, written by kernels
  OwnedMemory zeroed = allocate(0);                               // on the device: what follows
  uint32_t* is_claimed = nullptr;                                 // on the device; see Reporter
  mutable std::mutex finding;                                     // who takes what the record says
  mutable std::mutex calls;                                       // who launches a call of ranks
  NonFiniteRecord* non_finite = nullptr;                          // on the device
  mutable std::atomic<uint32_t> num_quantised = 0;                // calls, which number their notes
  mutable Grants shared_memory;                                   // bytes that kernels may have
  mutable TileCounters tile_counters, call_words;                 // lock themselves
};

inline const CudaState& cuda_state(const DeviceState& state) {
  return static_cast<const CudaState&>(state);
}

// "CALL failed: TEXT", with kDevice (kOutOfMemory where that is what happened).
Status cuda_error(std::string_view op, std::string_view call, cudaError_t error);

// The first finding of kernels that have run by now, as a sentence; it is forgotten by that.
Status take_finding(const CudaState& state, cudaStream_t stream);

// The first element that was infinite or NaN of what was quantised by now, as a sentence; it is
// forgotten by that. The stream's work is done.
Status take_non_finite(const CudaState& state, cudaStream_t stream);

// Makes a device current, and the one before it when it ends.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = -1;
  cudaError_t error_;
};

}  // namespace moire::cuda
