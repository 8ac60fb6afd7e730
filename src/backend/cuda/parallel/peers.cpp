#include "backend/cuda/parallel/peers.h"

#include <algorithm>
#include <cstdlib>

#include "backend/cuda/runtime/state.h"
#include "core/status_macros.h"

namespace moire::cuda {
namespace {

// The memory of all ranks, which stays until the last of them has gone.
struct Memories {
  struct Memory {
    int index;
    std::byte* data;
  };
  Memories() = default;
  Memories(const Memories&) = delete;
  Memories& operator=(const Memories&) = delete;
  // A kernel of one device, whose call failed, may still touch the memory of another.
  ~Memories() {
    for (const Memory& m : of) {
      const CurrentDevice current(m.index);
      cudaDeviceSynchronize();
    }
    for (const Memory& m : of) {
      const CurrentDevice current(m.index);
      cudaFree(m.data);
    }
  }
  std::vector<Memory> of;
};

// That the current device, `from`, reaches the memory of another.
Status reach(int from, int to) {
  if (from == to) return {};
  int can = 0;
  cudaError_t error = cudaDeviceCanAccessPeer(&can, from, to);
  if (error == cudaSuccess && can == 0) {
    return {Code::kUnsupported,
            concat(kCommunicator, ": CUDA device ", from, " does not reach the memory of device ",
                   to, ", which ranks on both need")};
  }
  if (error == cudaSuccess) error = cudaDeviceEnablePeerAccess(to, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
  return error == cudaSuccess ? Status()
                              : cuda_error(kCommunicator, "cudaDeviceEnablePeerAccess", error);
}

int index_of(const CommunicatorOptions& options, int rank) {
  return options.indices == nullptr ? 0 : options.indices[rank];
}

// Of a device. A rank whose launch lies in one of them behind what waits for that rank never comes.
int num_queues() {
  const char* const said = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return said == nullptr ? 8 : std::clamp(std::atoi(said), 1, 32);
}

// Zeroed memory of the current device.
Status allocate(const CommunicatorOptions& options, int rank, std::byte** memory) {
  const size_t bytes = memory_bytes(options);
  void* allocated = nullptr;
  cudaError_t error = bytes == SIZE_MAX ? cudaErrorMemoryAllocation : cudaMalloc(&allocated, bytes);
  *memory = static_cast<std::byte*>(allocated);
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    return no_memory(options, rank);
  }
  if (error != cudaSuccess) return cuda_error(kCommunicator, "cudaMalloc", error);
  error = cudaMemset(allocated, 0, bytes);
  if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);
  return error == cudaSuccess ? Status() : cuda_error(kCommunicator, "cudaMemset", error);
}

}  // namespace

Status CudaPeers::open(const CommunicatorOptions& options) {
  device = Device::kCuda;
  max_multiprocessors = options.num_multiprocessors;
  for (cudaError_t (*load_kernels)() :
       {load_meetings, ops::load_dispatch_plan, ops::load_dispatch, ops::load_combine}) {
    const cudaError_t error = load_kernels();
    if (error != cudaSuccess) return cuda_error(kCommunicator, "cudaFuncGetAttributes", error);
  }
  const size_t bytes = memory.size() * sizeof(std::byte*);
  void* allocated = nullptr;
  cudaError_t error = cudaMalloc(&allocated, bytes);
  table = static_cast<std::byte**>(allocated);
  if (error == cudaSuccess) error = cudaMemcpy(table, memory.data(), bytes, cudaMemcpyHostToDevice);
  int highest = 0;  // in whose queues hardly a kernel waits
  if (error == cudaSuccess) error = cudaDeviceGetStreamPriorityRange(nullptr, &highest);
  if (error == cudaSuccess) {
    error = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);
  return error == cudaSuccess ? Status() : cuda_error(kCommunicator, "cudaMalloc", error);
}

void CudaPeers::leave(int64_t why) const {
  if (stream == nullptr) return;
  const CurrentDevice current(index);
  const auto copy = [&](void* to, const void* from) {
    cudaMemcpyAsync(to, from, sizeof(int64_t), cudaMemcpyDefault, stream);
  };
  int64_t before = 0;
  copy(&before, &mailbox(rank, rank).gone);
  cudaStreamSynchronize(stream);
  if (before != 0) return;
  for (int of = 0; of < size(); ++of) copy(&mailbox(of, rank).gone, &why);
  cudaStreamSynchronize(stream);
}

CudaPeers::~CudaPeers() {
  if (table == nullptr) return;
  const CurrentDevice current(index);
  cudaFree(table);
  if (stream != nullptr) cudaStreamDestroy(stream);
}

Result<std::vector<std::unique_ptr<Peers>>> thread_peers(const CommunicatorOptions& options) {
  int devices = 0;
  const cudaError_t counted = cudaGetDeviceCount(&devices);
  if (counted != cudaSuccess) return cuda_error(kCommunicator, "cudaGetDeviceCount", counted);
  const auto memories = std::make_shared<Memories>();
  std::vector<std::unique_ptr<Peers>> out;
  std::vector<int> ranks_on(static_cast<size_t>(devices));
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    const int index = index_of(options, rank);
    if (index < 0 || index >= devices) {
      return invalid(kCommunicator,
                     concat("indices[", rank, "] is ", index, ", must be 0 to ", devices - 1));
    }
    if (++ranks_on[static_cast<size_t>(index)] > num_queues()) {
      return Status(Code::kUnsupported,
                    concat(kCommunicator, ": CUDA device ", index, " has ", num_queues(),
                           " hardware queues, needs one for each of its ranks, which are more: "
                           "CUDA_DEVICE_MAX_CONNECTIONS is at most 32, and 8 where it is not set"));
    }
    const CurrentDevice current(index);
    memories->of.push_back({index, nullptr});
    MOIRE_RETURN_IF_ERROR(allocate(options, rank, &memories->of.back().data));
  }
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    auto peers = std::make_unique<CudaPeers>();
    peers->set(options, rank);
    peers->index = index_of(options, rank);
    for (const auto& m : memories->of) peers->memory.push_back(m.data);
    peers->owner = memories;
    const CurrentDevice current(peers->index);
    for (int other = 0; other < options.num_ranks; ++other) {
      MOIRE_RETURN_IF_ERROR(reach(peers->index, index_of(options, other)));
    }
    MOIRE_RETURN_IF_ERROR(peers->open(options));
    out.push_back(std::move(peers));
  }
  return out;
}

}  // namespace moire::cuda
