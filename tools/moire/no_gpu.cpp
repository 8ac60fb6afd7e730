// A build without CUDA: there is no GPU to benchmark.
#include "gpu.h"

namespace moire::tool {

Result<std::unique_ptr<Gpu>> Gpu::open(int) {
  return Status(Code::kUnsupported, "bench: this build has no CUDA backend");
}

}  // namespace moire::tool
