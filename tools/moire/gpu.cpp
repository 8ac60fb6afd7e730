// The one file of the command line that uses the CUDA run-time; its one kernel is gpu_flush.cu.
#include "gpu.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "gpu_flush.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int64_t kCopyBytes = int64_t{1} << 30;
// A graph leaves larger ones to a copy engine, at two thirds of the bandwidth (2.7 of 4.2 TB/s on
// an H200).
constexpr int64_t kCopyPiece = int64_t{256} << 20;
constexpr int64_t kCachesFlushed = 2;  // what is read is more than stays
constexpr double kCopySeconds = 0.5;   // a GPU that comes from idle takes that long to full clocks

Status check(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {error == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kDevice,
          text("bench: ", call, " failed: ", cudaGetErrorString(error))};
}

void require(const char* call, cudaError_t error) {
  const Status status = check(call, error);
  if (!status.ok()) throw std::runtime_error(status.message());
}

class CapturedGraph : public Gpu::Graph {
 public:
  explicit CapturedGraph(cudaGraphExec_t executable) : executable_(executable) {}
  ~CapturedGraph() override { cudaGraphExecDestroy(executable_); }
  cudaGraphExec_t executable() const { return executable_; }

 private:
  cudaGraphExec_t executable_;
};

cudaGraphExec_t executable_of(const Gpu::Graph& graph) {
  return static_cast<const CapturedGraph&>(graph).executable();
}

}  // namespace

struct Gpu::State {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  cudaDeviceProp properties{};
  std::vector<void*> memory;
  void* zeros = nullptr;  // of the flush
};

Gpu::Gpu(std::unique_ptr<State> state) : state_(std::move(state)) {}

Gpu::~Gpu() {
  for (void* memory : state_->memory) cudaFree(memory);
  cudaEventDestroy(state_->begin);
  cudaEventDestroy(state_->end);
  cudaStreamDestroy(state_->stream);
}

Result<std::unique_ptr<Gpu>> Gpu::open(int index) {
  auto state = std::make_unique<State>();
  Status status = check("cudaSetDevice", cudaSetDevice(index));
  if (status.ok()) {
    status = check("cudaGetDeviceProperties", cudaGetDeviceProperties(&state->properties, index));
  }
  if (status.ok()) {
    status = check("cudaStreamCreateWithFlags",
                   cudaStreamCreateWithFlags(&state->stream, cudaStreamNonBlocking));
  }
  for (cudaEvent_t* event : {&state->begin, &state->end}) {
    if (status.ok()) status = check("cudaEventCreate", cudaEventCreate(event));
  }
  if (!status.ok()) return status;
  return std::unique_ptr<Gpu>(new Gpu(std::move(state)));
}

void* Gpu::stream() const { return state_->stream; }

std::string Gpu::bus_id() const {
  int index = 0;
  char place[32] = "";
  require("cudaGetDevice", cudaGetDevice(&index));
  require("cudaDeviceGetPCIBusId", cudaDeviceGetPCIBusId(place, sizeof(place), index));
  return place;
}

int64_t Gpu::cache_bytes() const { return state_->properties.l2CacheSize; }

int64_t Gpu::free_bytes() const {
  size_t free = 0, total = 0;
  require("cudaMemGetInfo", cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(free);
}

Result<std::unique_ptr<Gpu::Graph>> Gpu::capture(const std::function<Status()>& enqueue) const {
  Status status = check("cudaStreamBeginCapture",
                        cudaStreamBeginCapture(state_->stream, cudaStreamCaptureModeGlobal));
  if (!status.ok()) return status;
  status = enqueue();
  cudaGraph_t graph = nullptr;
  const Status ended = check("cudaStreamEndCapture", cudaStreamEndCapture(state_->stream, &graph));
  cudaGraphExec_t executable = nullptr;
  if (status.ok()) status = ended;
  if (status.ok()) {
    status = check("cudaGraphInstantiate", cudaGraphInstantiate(&executable, graph, 0));
  }
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (!status.ok()) return status;
  return std::unique_ptr<Graph>(new CapturedGraph(executable));
}

double Gpu::seconds(const Graph& before, const Graph& timed) const {
  const State& s = *state_;
  require("cudaGraphLaunch", cudaGraphLaunch(executable_of(before), s.stream));
  require("cudaEventRecord", cudaEventRecord(s.begin, s.stream));
  require("cudaGraphLaunch", cudaGraphLaunch(executable_of(timed), s.stream));
  require("cudaEventRecord", cudaEventRecord(s.end, s.stream));
  require("cudaEventSynchronize", cudaEventSynchronize(s.end));
  float milliseconds = 0;
  require("cudaEventElapsedTime", cudaEventElapsedTime(&milliseconds, s.begin, s.end));
  return 1e-3 * static_cast<double>(milliseconds);
}

void Gpu::launch(const Graph& graph) const {
  require("cudaGraphLaunch", cudaGraphLaunch(executable_of(graph), state_->stream));
}

void Gpu::flush() {
  const int64_t bytes = kCachesFlushed * cache_bytes();
  if (state_->zeros == nullptr) {
    state_->zeros = take(bytes);
    require("cudaMemsetAsync",
            cudaMemsetAsync(state_->zeros, 0, static_cast<size_t>(bytes), state_->stream));
  }
  launch_flush(state_->stream, state_->zeros, bytes);
  require("flush", cudaGetLastError());
}

Gpu::Mark Gpu::mark() const {
  cudaEvent_t event = nullptr;
  require("cudaEventCreate", cudaEventCreate(&event));
  Mark mark(event, [](void* e) { cudaEventDestroy(static_cast<cudaEvent_t>(e)); });
  require("cudaEventRecord", cudaEventRecord(event, state_->stream));
  return mark;
}

void Gpu::wait(const Mark& mark) const {
  require("cudaEventSynchronize", cudaEventSynchronize(static_cast<cudaEvent_t>(mark.get())));
}

double Gpu::seconds(const Mark& begin, const Mark& end) const {
  float milliseconds = 0;
  require("cudaEventElapsedTime",
          cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin.get()),
                               static_cast<cudaEvent_t>(end.get())));
  return 1e-3 * static_cast<double>(milliseconds);
}

double Gpu::copy_bandwidth() const {
  void* both = nullptr;
  require("cudaMalloc", cudaMalloc(&both, 2 * kCopyBytes));
  const std::unique_ptr<void, decltype(&cudaFree)> memory(both, cudaFree);
  auto graph =
      capture([&] { return copy(static_cast<char*>(both) + kCopyBytes, both, kCopyBytes); });
  if (!graph.ok()) throw std::runtime_error(graph.status().message());
  double least = 0;
  for (double spent = 0; spent < kCopySeconds;) {
    const double t = seconds(*graph.value(), *graph.value());
    least = spent == 0 ? t : std::min(least, t);
    spent += t;
  }
  return 2.0 * static_cast<double>(kCopyBytes) / least;
}

void* Gpu::take(int64_t bytes) {
  void* memory = nullptr;
  require("cudaMalloc", cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1))));
  state_->memory.push_back(memory);
  return memory;
}

Status Gpu::copy(void* to, const void* from, int64_t bytes) const {
  Status status;
  for (int64_t done = 0; done < bytes && status.ok(); done += kCopyPiece) {
    status =
        check("cudaMemcpyAsync",
              cudaMemcpyAsync(static_cast<char*>(to) + done, static_cast<const char*>(from) + done,
                              static_cast<size_t>(std::min(kCopyPiece, bytes - done)),
                              cudaMemcpyDeviceToDevice, state_->stream));
  }
  return status;
}

}  // namespace moire::tool
