// CudaPeers: ranks whose windows are memory of CUDA devices, each of which reaches those of all.
#pragma once

#include <cuda_runtime.h>

#include "parallel/peers.h"

namespace moire::cuda {

// Between creation and destruction its memory is there; `memory` has device addresses.
struct CudaPeers : Peers {
  CudaPeers() = default;
  ~CudaPeers() override;
  CudaPeers(const CudaPeers&) = delete;
  CudaPeers& operator=(const CudaPeers&) = delete;

  // On the current device, once rank, index and memory are known, and before any kernel waits:
  // loading a kernel later might wait for those that wait.
  Status open(const CommunicatorOptions& options);
  // By copies on a stream of its own, beside kernels that wait.
  void leave(int64_t why) const override;

  std::byte** table = nullptr;  // `memory`, on the device
  cudaStream_t stream = nullptr;
  int max_multiprocessors = 0;  // that moving rows takes; 0: all
};

// Loads kernels on the current device.
template <class... Kernels>
cudaError_t load(Kernels... kernels) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaSuccess;
  ((error = error == cudaSuccess ? cudaFuncGetAttributes(&attributes, kernels) : error), ...);
  return error;
}
// Those of each op.
cudaError_t load_meetings();
namespace ops {
cudaError_t load_dispatch_plan();
cudaError_t load_dispatch();
cudaError_t load_combine();
}  // namespace ops

}  // namespace moire::cuda
