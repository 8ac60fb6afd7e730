// The one file of the command line that uses the CUDA run-time; its one kernel is gpu_flush.cu.
#include "gpu.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "commands.h"
#include "gpu_flush.h"
#include "terminal.h"
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

class CapturedGraph : public Gpu::Graph {
 public:
  explicit CapturedGraph(cudaGraphExec_t executable) : executable_(executable) {}
  ~CapturedGraph() override { cudaGraphExecDestroy(executable_); }
  cudaGraphExec_t executable() const { return executable_; }

 private:
  cudaGraphExec_t executable_;
};

cudaEvent_t event_of(const TimedGpu::Mark& mark) { return static_cast<cudaEvent_t>(mark.get()); }

class CudaGpu : public Gpu {
 public:
  ~CudaGpu() override {
    for (void* memory : memory_) cudaFree(memory);
    cudaStreamDestroy(stream_);
  }
  Status open(int index) {
    Status status = check("cudaSetDevice", cudaSetDevice(index));
    if (!status.ok()) return status;
    status = check("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties_, index));
    if (!status.ok()) return status;
    return check("cudaStreamCreateWithFlags",
                 cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }

  void* stream() const override { return stream_; }
  std::string bus_id() const override {
    int index = 0;
    char place[32] = "";
    require("cudaGetDevice", cudaGetDevice(&index));
    require("cudaDeviceGetPCIBusId", cudaDeviceGetPCIBusId(place, sizeof(place), index));
    return place;
  }
  int64_t cache_bytes() const override { return properties_.l2CacheSize; }
  int64_t free_bytes() const override {
    size_t free = 0, total = 0;
    require("cudaMemGetInfo", cudaMemGetInfo(&free, &total));
    return static_cast<int64_t>(free);
  }

  Result<std::unique_ptr<Graph>> capture(const std::function<Status()>& enqueue) override {
    Status status = check("cudaStreamBeginCapture",
                          cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    if (!status.ok()) return status;
    status = enqueue();
    cudaGraph_t graph = nullptr;
    const Status ended = check("cudaStreamEndCapture", cudaStreamEndCapture(stream_, &graph));
    cudaGraphExec_t executable = nullptr;
    if (status.ok()) status = ended;
    if (status.ok()) {
      status = check("cudaGraphInstantiate", cudaGraphInstantiate(&executable, graph, 0));
    }
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (!status.ok()) return status;
    return std::unique_ptr<Graph>(new CapturedGraph(executable));
  }
  void launch(const Graph& graph) override {
    const cudaGraphExec_t executable = static_cast<const CapturedGraph&>(graph).executable();
    require("cudaGraphLaunch", cudaGraphLaunch(executable, stream_));
  }

  double now() override { return tool::now(); }
  void flush() override {
    const int64_t bytes = kCachesFlushed * cache_bytes();
    if (zeros_ == nullptr) {
      zeros_ = take(bytes);
      require("cudaMemsetAsync", cudaMemsetAsync(zeros_, 0, static_cast<size_t>(bytes), stream_));
    }
    launch_flush(stream_, zeros_, bytes);
    require("flush", cudaGetLastError());
  }
  Mark mark() override {
    cudaEvent_t event = nullptr;
    require("cudaEventCreate", cudaEventCreate(&event));
    Mark mark(event, [](void* e) { cudaEventDestroy(static_cast<cudaEvent_t>(e)); });
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
  cudaStream_t stream_ = nullptr;
  cudaDeviceProp properties_{};
  std::vector<void*> memory_;
  void* zeros_ = nullptr;  // of the flush
};

}  // namespace

Result<std::unique_ptr<Gpu>> Gpu::open(int index) {
  auto gpu = std::make_unique<CudaGpu>();
  if (Status status = gpu->open(index); !status.ok()) return status;
  return std::unique_ptr<Gpu>(std::move(gpu));
}

}  // namespace moire::tool
