// CUDA devices: how many, what they are, and the first error that one reported.
#include "backend/device.h"

#include "backend/cuda/runtime/state.h"
#include "core/format.h"
#include "parallel/peers.h"

namespace moire::cuda {
namespace {

constexpr int kOldestCapability = 80;

// 13020 is CUDA 13.2.
std::string cuda_version(int version) {
  return concat("CUDA ", version / 1000, ".", version % 1000 / 10);
}

Status no_driver() {
  int found = 0;
  const bool is_known = cudaDriverGetVersion(&found) == cudaSuccess && found != 0;
  return {Code::kUnsupported,
          concat("context: found ",
                 is_known ? concat("an NVIDIA driver for ", cuda_version(found))
                          : std::string("no NVIDIA driver"),
                 ", needs one for ", cuda_version(CUDART_VERSION / 1000 * 1000), " or newer")};
}

Result<int> count() {
  int n = 0;
  const cudaError_t error = cudaGetDeviceCount(&n);
  if (error == cudaErrorNoDevice) return 0;
  if (error == cudaErrorInsufficientDriver) return no_driver();
  if (error != cudaSuccess) return cuda_error("context", "cudaGetDeviceCount", error);
  return n;
}

Status describe(CudaState& state) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, state.index);
  if (error != cudaSuccess) return cuda_error("context", "cudaGetDeviceProperties", error);
  state.device = Device::kCuda;
  state.name = properties.name;
  state.compute_capability = 10 * properties.major + properties.minor;
  state.num_multiprocessors = properties.multiProcessorCount;
  state.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  if (state.compute_capability < kOldestCapability) {
    return {Code::kUnsupported,
            concat("context: ", state.name, " has compute capability ", properties.major, ".",
                   properties.minor, ", needs 8.0 or newer")};
  }
  return {};
}

// The driver's encoder of tensor maps, without linking to it, as CUDA 12.0 has it.
Status find_encoder(CudaState& state) {
  if (state.compute_capability < 90) return {};
  constexpr const char* kName = "cuTensorMapEncodeTiled";
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) {
    return cuda_error("context", "cudaGetDriverEntryPoint(cuTensorMapEncodeTiled)", error);
  }
  if (found != cudaDriverEntryPointSuccess) {
    return {Code::kUnsupported,
            "context: the driver has no cuTensorMapEncodeTiled, needs that of CUDA 12.0 or newer"};
  }
  state.encode_tensor_map = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  return {};
}

Status allocate_memory(CudaState& state) {
  void* memory = nullptr;
  struct Record : ErrorRecord {
    EndedCall ended;
  };
  const cudaError_t error = cudaHostAlloc(&memory, sizeof(Record), cudaHostAllocMapped);
  if (error != cudaSuccess) return cuda_error("context", "cudaHostAlloc", error);
  auto* const record = new (memory) Record{};
  record->call = &record->ended;
  state.record = record;
  struct Zeroed {
    NonFiniteRecord non_finite;
    uint32_t is_claimed, words[2][TileCounters::kCount];
  };
  state.zeroed = state.allocate(sizeof(Zeroed));
  auto* const zeroed = static_cast<Zeroed*>(state.zeroed.get());
  if (zeroed == nullptr) return cuda_error("context", "cudaMalloc", cudaErrorMemoryAllocation);
  state.is_claimed = &zeroed->is_claimed;
  state.non_finite = &zeroed->non_finite;
  state.tile_counters.share_out(zeroed->words[0]);
  state.call_words.share_out(zeroed->words[1]);
  return {};
}

Result<std::unique_ptr<DeviceState>> open(const ContextOptions& options) {
  auto state = std::make_unique<CudaState>();
  state->index = options.index;
  const CurrentDevice current(options.index);
  if (current.error() != cudaSuccess) {
    return cuda_error("context", "cudaSetDevice", current.error());
  }
  for (Status (*step)(CudaState&) : {describe, find_encoder, allocate_memory}) {
    if (const Status status = step(*state); !status.ok()) return status;
  }
  return std::unique_ptr<DeviceState>(std::move(state));
}

Status check(const DeviceState& state, void* stream) {
  const CurrentDevice current(state.index);
  const auto s = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaStreamSynchronize(s);
  if (error != cudaSuccess) return cuda_error("context", "cudaStreamSynchronize", error);
  const Status wrong = take_finding(cuda_state(state), s);
  return wrong.ok() ? take_non_finite(cuda_state(state), s) : wrong;
}

// GPUs that can be planned for without one: all that implementations ask of a device to choose.
struct Plan {
  std::string_view name;
  int compute_capability, num_multiprocessors;
};
constexpr Plan kPlans[] = {
    {"sm80", 80, 108},    // A100
    {"sm86", 86, 84},     // A40
    {"sm89", 89, 142},    // L40S
    {"sm90", 90, 132},    // H100 SXM, H200
    {"sm100", 100, 148},  // B200
    {"sm120", 120, 188},  // RTX PRO 6000
};

Result<std::unique_ptr<DeviceState>> plan(std::string_view name) {
  std::string known;
  for (const Plan& p : kPlans) {
    known += concat(known.empty() ? "" : ", ", p.name);
    if (p.name != name) continue;
    auto state = std::make_unique<DeviceState>();
    state->device = Device::kCuda;
    state->is_planned = true;
    state->name = name;
    state->compute_capability = p.compute_capability;
    state->num_multiprocessors = p.num_multiprocessors;
    return state;
  }
  return Status(Code::kInvalidArgument,
                concat("context: plan_for is \"", name, "\", must be one of ", known));
}

}  // namespace

const DeviceKind kDevice = {count, open, check, plan};

}  // namespace moire::cuda
