// Ranks that NCCL connects. It gives memory that is symmetric, and where that of each rank lies for
// this one, by functions of the host alone; it moves nothing. The library is opened at run time,
// the process's own first; what is used of its header is declared here.
#include <dlfcn.h>

#include <array>
#include <cstring>

#include "backend/cuda/parallel/peers.h"
#include "backend/cuda/runtime/state.h"
#include "core/status_macros.h"

namespace moire::cuda {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";
constexpr int kOldest = 22902;   // the first with ncclGetPeerDevicePointer
constexpr int kSymmetric = 1;    // NCCL_WIN_COLL_SYMMETRIC
constexpr int64_t kPage = 4096;  // NCCL_WIN_REQUIRED_ALIGNMENT

using Comm = void*;
using Window = void*;
struct UniqueId {
  std::array<char, 128> bytes;
};

std::string version_text(int version) {
  return concat("NCCL ", version / 10000, ".", version / 100 % 100, ".", version % 100);
}

// Name, result and arguments of what is used, without its prefix.
#define MOIRE_FOR_EACH_NCCL(X)                                        \
  X(GetErrorString, const char*, int)                                 \
  X(CommInitRank, int, Comm*, int num_ranks, UniqueId, int rank)      \
  X(CommAbort, int, Comm)                                             \
  X(CommCount, int, Comm, int*)                                       \
  X(CommUserRank, int, Comm, int*)                                    \
  X(CommCuDevice, int, Comm, int*)                                    \
  X(MemAlloc, int, void**, size_t)                                    \
  X(MemFree, int, void*)                                              \
  X(CommWindowRegister, int, Comm, void*, size_t, Window*, int flags) \
  X(CommWindowDeregister, int, Comm, Window)                          \
  X(GetPeerDevicePointer, int, Window, size_t offset, int rank, void**)

// The library, which stays open.
struct Nccl {
#define MOIRE_POINTER(name, result, ...) result (*name)(__VA_ARGS__);
  MOIRE_FOR_EACH_NCCL(MOIRE_POINTER)
#undef MOIRE_POINTER

  Status open() {
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) library = dlopen(kLibrary, RTLD_NOW);
    if (library == nullptr) return unusable(concat("no NCCL (", dlerror(), ")"));
    int version = 0;
    auto* const get = reinterpret_cast<int (*)(int*)>(dlsym(library, "ncclGetVersion"));
    if (get == nullptr || get(&version) != 0 || version < kOldest) {
      return unusable(version_text(version));
    }
#define MOIRE_FIND(name, ...)                                            \
  name = reinterpret_cast<decltype(name)>(dlsym(library, "nccl" #name)); \
  if (name == nullptr) return unusable(concat(version_text(version), " without nccl" #name));
    MOIRE_FOR_EACH_NCCL(MOIRE_FIND)
#undef MOIRE_FIND
    return {};
  }
  Status check(std::string_view call, int result) const {
    if (result == 0) return {};
    return {Code::kDevice, concat(kCommunicator, ": ", call, " failed: ", GetErrorString(result))};
  }

 private:
  static Status unusable(std::string_view found) {
    return {Code::kUnsupported, concat(kCommunicator, ": found ", found, ", needs ",
                                       version_text(kOldest), " or newer as ", kLibrary)};
  }
};

struct NcclPeers : CudaPeers {
  // Pages that others still write stay theirs until they let go of them as well.
  ~NcclPeers() override {
    if (comm == nullptr) return;
    const CurrentDevice current(index);
    cudaDeviceSynchronize();
    if (window != nullptr) nccl.CommWindowDeregister(comm, window);
    if (own != nullptr) nccl.MemFree(own);
    if (owns_comm) nccl.CommAbort(comm);
  }

  Nccl nccl{};
  Comm comm = nullptr;
  bool owns_comm = false;
  void* own = nullptr;  // this rank's memory
  Window window = nullptr;
};

// Whose communicator it is, how many it has and which this is.
Status join(NcclPeers& peers, CommunicatorOptions& options) {
  const Nccl& nccl = peers.nccl;
  peers.comm = options.nccl_comm;
  if (peers.comm == nullptr) {
    UniqueId id;
    std::memcpy(&id, options.nccl_id, sizeof(id));
    peers.index = options.indices == nullptr ? 0 : options.indices[0];
    const CurrentDevice current(peers.index);
    if (current.error() != cudaSuccess) {
      return cuda_error(kCommunicator, "cudaSetDevice", current.error());
    }
    peers.owns_comm = true;
    return nccl.check("ncclCommInitRank",
                      nccl.CommInitRank(&peers.comm, options.num_ranks, id, options.rank));
  }
  MOIRE_RETURN_IF_ERROR(
      nccl.check("ncclCommCount", nccl.CommCount(peers.comm, &options.num_ranks)));
  MOIRE_RETURN_IF_ERROR(
      nccl.check("ncclCommUserRank", nccl.CommUserRank(peers.comm, &options.rank)));
  if (options.num_ranks > kMostRanks) {
    return invalid(kCommunicator, concat("nccl_comm has ", options.num_ranks, " ranks, at most ",
                                         kMostRanks, " are taken"));
  }
  return nccl.check("ncclCommCuDevice", nccl.CommCuDevice(peers.comm, &peers.index));
}

// This rank's memory, zeroed before any other has its address, and that of all.
Status share(NcclPeers& peers, const CommunicatorOptions& options) {
  const Nccl& nccl = peers.nccl;
  const size_t wanted = memory_bytes(options);
  if (wanted > SIZE_MAX - kPage) return no_memory(options, peers.rank);
  const auto bytes = static_cast<size_t>(round_up(static_cast<int64_t>(wanted), kPage));
  if (nccl.MemAlloc(&peers.own, bytes) != 0) return no_memory(options, peers.rank);
  cudaError_t error = cudaMemset(peers.own, 0, bytes);
  if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);
  if (error != cudaSuccess) return cuda_error(kCommunicator, "cudaMemset", error);
  MOIRE_RETURN_IF_ERROR(
      nccl.check("ncclCommWindowRegister",
                 nccl.CommWindowRegister(peers.comm, peers.own, bytes, &peers.window, kSymmetric)));
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    void* there = rank == peers.rank ? peers.own : nullptr;
    if (there == nullptr && peers.window != nullptr) {
      MOIRE_RETURN_IF_ERROR(nccl.check("ncclGetPeerDevicePointer",
                                       nccl.GetPeerDevicePointer(peers.window, 0, rank, &there)));
    }
    if (there == nullptr) {
      return {Code::kUnsupported,
              concat(kCommunicator, ": rank ", peers.rank, " does not reach the memory of rank ",
                     rank, ", needs GPUs that reach each other and NCCL's symmetric windows")};
    }
    peers.memory.push_back(static_cast<std::byte*>(there));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Peers>> nccl_peers(const CommunicatorOptions& given) {
  auto peers = std::make_unique<NcclPeers>();
  CommunicatorOptions options = given;
  MOIRE_RETURN_IF_ERROR(peers->nccl.open());
  MOIRE_RETURN_IF_ERROR(join(*peers, options));
  const CurrentDevice current(peers->index);
  peers->set(options, options.rank);
  MOIRE_RETURN_IF_ERROR(share(*peers, options));
  MOIRE_RETURN_IF_ERROR(peers->open(options));
  return std::unique_ptr<Peers>(std::move(peers));
}

}  // namespace moire::cuda
