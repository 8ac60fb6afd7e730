#include "backend/cuda/runtime/state.h"

#include "core/format.h"
#include "parallel/peers.h"

namespace moire::cuda {

Status cuda_error(std::string_view op, std::string_view call, cudaError_t error) {
  const Code code = error == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kDevice;
  return {code, concat(op, ": ", call, " failed: ", cudaGetErrorString(error))};
}

OwnedMemory CudaState::allocate(size_t bytes) const {
  OwnedMemory memory(nullptr, [](void* p) { cudaFree(p); });
  if (bytes == 0) return memory;
  const CurrentDevice current(index);
  void* allocated = nullptr;
  cudaError_t error = cudaMalloc(&allocated, bytes);
  memory.reset(allocated);
  if (error == cudaSuccess) error = cudaMemset(allocated, 0, bytes);
  if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);  // for all streams
  if (error == cudaSuccess) return memory;
  cudaGetLastError();  // said here alone
  return {nullptr, memory.get_deleter()};
}

CurrentDevice::CurrentDevice(int index) {
  error_ = cudaGetDevice(&before_);
  // Also where it is current already: a new thread has no context for the driver's own functions,
  // the encoder of tensor maps among them, until this has been called.
  if (error_ == cudaSuccess) error_ = cudaSetDevice(index);
  if (before_ == index) before_ = -1;  // nothing to restore
}
CurrentDevice::~CurrentDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

namespace {

std::string sentence(const ErrorRecord& r, Finding finding) {
  switch (finding) {
    case Finding::kNone:
    case Finding::kEndedCall:
      break;
    case Finding::kFirstOffset:
      return concat("groups.offsets[0] is ", r.value, ", must be 0");
    case Finding::kDecreasing:
      return concat("group ", r.index, " has offsets ", r.limit, " to ", r.value,
                    ", must not decrease");
    case Finding::kPastCapacity:
      return concat("group ", r.index, " ends at row ", r.value, ", past the capacity ", r.limit);
    case Finding::kNegativeSplit:
      return concat("group ", r.index, " has ", r.value, " rows, must not be negative");
    case Finding::kPastOutput:
      return concat("group ", r.index, " ends at row ", r.value, ", times ", r.limit, " exceeds ",
                    r.tensor);
    case Finding::kIndexOutside:
      return concat(r.tensor, "[", r.index, "] is ", r.value, ", must be below ", r.limit);
    case Finding::kTooFewRows:
      return concat(r.value, " rows are routed, past the capacity ", r.limit);
    case Finding::kTooFewScaleRows:
      return concat(r.tensor, " has ", r.limit, " rows, needs at least ", r.value,
                    " for these groups");
    case Finding::kNotOncePerRow:
      return concat("scatter_idx names ", r.value, " rows but the groups have ", r.limit);
  }
  return "nothing was found";
}

}  // namespace

Status take_finding(const CudaState& state, cudaStream_t stream) {
  if (state.record->finding == Finding::kNone) return {};
  const std::lock_guard lock(state.finding);
  const Finding finding = state.record->finding;
  if (finding == Finding::kNone) return {};  // another thread has just told it
  const ErrorRecord& record = *state.record;
  Status told =
      finding == Finding::kEndedCall
          ? status_of(*record.call)
          : Status(Code::kInvalidArgument, concat(record.op, ": ", sentence(record, finding)));
  told = Status(told.code(), told.message() + " (found on the device, by an earlier call)");
  // While a stream is captured nothing can be cleared now: what was found stays, and is said again.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t asked = cudaStreamIsCapturing(stream, &capture);
  if (asked != cudaSuccess || capture != cudaStreamCaptureStatusNone) return told;
  state.record->finding = Finding::kNone;
  const cudaError_t error = cudaMemsetAsync(state.is_claimed, 0, sizeof(uint32_t), stream);
  if (error != cudaSuccess) return cuda_error("context", "cudaMemsetAsync", error);
  return told;
}

Status take_non_finite(const CudaState& state, cudaStream_t stream) {
  const std::lock_guard lock(state.finding);
  NonFiniteRecord found;
  cudaError_t error =
      cudaMemcpyAsync(&found, state.non_finite, sizeof(found), cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return cuda_error("context", "cudaMemcpyAsync", error);
  const NonFiniteCall& call = found.call;
  if (call.id == 0) return {};
  error = cudaMemsetAsync(&state.non_finite->call.id, 0, sizeof(call.id), stream);
  if (error != cudaSuccess) return cuda_error("context", "cudaMemsetAsync", error);
  const int64_t n = call.matrix_rows;
  const std::string row =
      n == 0 ? concat(found.named_row) : concat(found.named_row / n, ", ", found.named_row % n);
  return {Code::kInvalidArgument,
          concat(std::string_view(call.op, call.op_length), ": ",
                 std::string_view(call.operand, call.operand_length), "[", row, ", ", found.column,
                 "]", call.is_decoded ? ", decoded," : "",
                 " is infinite or NaN: infinities were saturated, NaN kept, in their own blocks")};
}

}  // namespace moire::cuda
