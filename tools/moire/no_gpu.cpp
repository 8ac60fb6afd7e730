// A build without CUDA: there is no GPU to benchmark.
#include "commands.h"
#include "gpu.h"

namespace moire::tool {

std::unique_ptr<Gpu> Gpu::open(int) { throw UsageError("bench: this build has no CUDA backend"); }

}  // namespace moire::tool
