#include "backend/cuda/runtime/tile_counters.h"

namespace moire::cuda {
namespace {

// The stream's number, which no other stream ever has. Asking for it may end a capture with an
// error: not to be asked of a capturing stream, and another's capture on this thread is told to
// overlook it.
cudaError_t number_of(cudaStream_t stream, unsigned long long* number) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  error = cudaStreamGetId(stream, number);
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  return error == cudaSuccess ? restored : error;
}

}  // namespace

uint32_t* TileCounters::next(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  const bool is_captured = error == cudaSuccess && capture != cudaStreamCaptureStatusNone;
  if (error == cudaSuccess && !is_captured) error = number_of(stream, &number);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the launch will say what is wrong with the stream
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  if (is_captured) return take();
  const auto [entry, is_new] = of_stream_.try_emplace(number, nullptr);
  if (is_new) entry->second = take();
  return entry->second;
}

uint32_t* TileCounters::take() { return num_taken_ < kCount ? memory_ + num_taken_++ : nullptr; }

}  // namespace moire::cuda
