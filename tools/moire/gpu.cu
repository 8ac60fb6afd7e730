// The one file of the command line that uses the CUDA run-time, and its one kernel.
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "commands.h"
#include "gpu.h"
#include "harness.h"
#include "text.h"

namespace moire::tool {
namespace {

// A graph leaves larger ones to a copy engine, at two thirds of the bandwidth (2.7 of 4.2 TB/s on
// an H200).
constexpr int64_t kCopyPiece = int64_t{256} << 20;
constexpr int64_t kCachesFlushed = 2;  // what is read is more than stays

Status check(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {error == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kDevice,
          text("bench: ", call, " failed: ", cudaGetErrorString(error))};
}

void require(const char* call, cudaError_t error) { tool::require(check(call, error)); }

constexpr int kThreads = 512, kBlocks = 1024, kInFlight = 4;

// Empties the L2 cache of what a call left there. Lines that are only read need no writing back,
// which a call behind the flush would have to wait for.
__global__ void read_all(uint4* memory, int64_t count) {
  const int64_t step = int64_t{kThreads} * kBlocks;
  unsigned seen = 0;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += kInFlight * step) {
    uint4 values[kInFlight];
#pragma unroll
    for (int64_t j = 0; j < kInFlight; ++j) values[j] = memory[min(i + j * step, count - 1)];
#pragma unroll
    for (const uint4 v : values) seen |= v.x | v.y | v.z | v.w;
  }
  // Never true of zeros; without a use of what was read nothing would be read.
  if (seen != 0) memory->x = seen;
}

cudaEvent_t event_of(const TimedGpu::Mark& mark) { return static_cast<cudaEvent_t>(mark.get()); }

class CudaGpu : public Gpu {
 public:
  explicit CudaGpu(int index) : index_(index) {
    usage(check("cudaSetDevice", cudaSetDevice(index)));
    usage(check("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties_, index)));
    usage(check("cudaStreamCreateWithFlags",
                cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)));
  }
  ~CudaGpu() override {
    for (void* memory : memory_) cudaFree(memory);
    cudaStreamDestroy(stream_);
  }

  void* stream() const override { return stream_; }
  std::string bus_id() const override {
    char place[32] = "";
    require("cudaDeviceGetPCIBusId", cudaDeviceGetPCIBusId(place, sizeof(place), index_));
    return place;
  }
  int64_t cache_bytes() const override { return properties_.l2CacheSize; }
  int64_t free_bytes() const override {
    size_t free = 0, total = 0;
    require("cudaMemGetInfo", cudaMemGetInfo(&free, &total));
    return static_cast<int64_t>(free);
  }

  Graph capture(const std::function<Status()>& enqueue) override {
    require("cudaStreamBeginCapture", cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    const Status enqueued = enqueue();
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
    tool::require(enqueued);
    require("cudaStreamEndCapture", ended);
    cudaGraphExec_t executable = nullptr;
    const cudaError_t instantiated = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    require("cudaGraphInstantiate", instantiated);
    return {{executable, cudaGraphExecDestroy}};
  }
  void launch(const Graph& graph) override {
    require("cudaGraphLaunch",
            cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph.executable.get()), stream_));
  }

  double now() override { return tool::now(); }
  void flush() override {
    const int64_t bytes = kCachesFlushed * cache_bytes();
    if (zeros_ == nullptr) {
      zeros_ = take(bytes);
      require("cudaMemsetAsync", cudaMemsetAsync(zeros_, 0, static_cast<size_t>(bytes), stream_));
    }
    read_all<<<kBlocks, kThreads, 0, stream_>>>(static_cast<uint4*>(zeros_),
                                                bytes / static_cast<int64_t>(sizeof(uint4)));
    require("flush", cudaGetLastError());
  }
  Mark mark() override {
    cudaEvent_t event = nullptr;
    require("cudaEventCreate", cudaEventCreate(&event));
    Mark mark(event, cudaEventDestroy);
    require("cudaEventRecord", cudaEventRecord(event, stream_));
    return mark;
  }
  void wait(const Mark& mark) override {
    require("cudaEventSynchronize", cudaEventSynchronize(event_of(mark)));
  }
  double seconds(const Mark& begin, const Mark& end) override {
    float milliseconds = 0;
    require("cudaEventElapsedTime",
            cudaEventElapsedTime(&milliseconds, event_of(begin), event_of(end)));
    return 1e-3 * static_cast<double>(milliseconds);
  }

  void* take(int64_t bytes) override {
    void* memory = nullptr;
    require("cudaMalloc", cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1))));
    memory_.push_back(memory);
    return memory;
  }
  Status copy(void* to, const void* from, int64_t bytes) override {
    Status status;
    for (int64_t done = 0; done < bytes && status.ok(); done += kCopyPiece) {
      const auto piece = static_cast<size_t>(std::min(kCopyPiece, bytes - done));
      status = check("cudaMemcpyAsync", cudaMemcpyAsync(static_cast<char*>(to) + done,
                                                        static_cast<const char*>(from) + done,
                                                        piece, cudaMemcpyDeviceToDevice, stream_));
    }
    return status;
  }

 private:
  int index_;
  cudaStream_t stream_ = nullptr;
  cudaDeviceProp properties_{};
  std::vector<void*> memory_;
  void* zeros_ = nullptr;  // of the flush
};

}  // namespace

std::unique_ptr<Gpu> Gpu::open(int index) { return std::make_unique<CudaGpu>(index); }

}  // namespace moire::tool
