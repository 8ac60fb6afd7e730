// Launcher: how an op's kernels are launched. It makes the context's device current, returns what
// earlier kernels found wrong, and after the first failure launches nothing more.
#pragma once

#include <moire/context.h>

#include <optional>
#include <utility>

#include "backend/cuda/runtime/state.h"
#include "core/divide.h"
#include "core/format.h"

namespace moire::cuda {

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;  // dynamic ones
};

// Blocks that cover so many items. What no grid holds is a number that CUDA refuses.
inline uint32_t blocks_for(int64_t items, int64_t per_block) {
  const int64_t blocks = ceil_div(items, per_block);
  return blocks > UINT32_MAX ? UINT32_MAX : static_cast<uint32_t>(blocks);
}

// Why kernels, which count columns in 32 bits, do not take so many; nothing if they do.
inline std::optional<std::string> too_wide(std::string_view name, int64_t columns, int bits = 30) {
  if (columns < int64_t{1} << bits) return std::nullopt;
  return concat(name, " has ", columns, " columns, less than 2^", bits, " are taken");
}

class Launcher {
 public:
  // `op` is a literal: kernels' findings carry it.
  Launcher(const Context& context, const char* op)
      : state_(cuda_state(context.state())),
        stream_(static_cast<cudaStream_t>(context.options().stream)),
        op_(op),
        device_(context.state().index) {
    status_ = device_.error() == cudaSuccess ? take_finding(state_, stream_)
                                             : cuda_error(op, "cudaSetDevice", device_.error());
  }

  const CudaState& state() const { return state_; }
  const char* op() const { return op_; }
  cudaStream_t stream() const { return stream_; }
  uint32_t* tile_counter() const { return ok() ? state_.tile_counters.next(stream_) : nullptr; }
  Reporter reporter() const { return {state_.record, state_.is_claimed, op_}; }
  bool ok() const { return status_.ok(); }
  Status status() const { return status_; }
  // What a launch would need is not to be had.
  void fail(Status status) {
    if (ok()) status_ = std::move(status);
  }

  // A grid without blocks launches nothing.
  template <class... P, class... A>
  void launch(void (*kernel)(P...), const LaunchShape& shape, A&&... args) {
    if (!ok() || shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
    // Beside a kernel's static memory this may be more than it has without asking; asked for once
    // per kernel and device.
    if (shape.shared_bytes > 0) {
      state_.shared_memory.need(reinterpret_cast<const void*>(kernel), shape.shared_bytes, [&] {
        check("cudaFuncSetAttribute",
              cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shape.shared_bytes)));
        return ok();
      });
      if (!ok()) return;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream_;
    check("cudaLaunchKernelEx", cudaLaunchKernelEx(&config, kernel, std::forward<A>(args)...));
  }

 private:
  void check(std::string_view call, cudaError_t error) {
    if (error == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());  // it is ours to report, not the next caller's
    fail(cuda_error(op_, call, error));
  }

  const CudaState& state_;
  cudaStream_t stream_;
  const char* op_;
  CurrentDevice device_;
  Status status_;
};

}  // namespace moire::cuda
