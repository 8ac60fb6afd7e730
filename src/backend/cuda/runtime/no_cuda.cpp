// CUDA in a build without it: every request says so.
#include "backend/device.h"

namespace moire::cuda {
namespace {

Status not_built() {
  return {Code::kUnsupported, "context: this build of moire has no CUDA: " MOIRE_NO_CUDA_REASON};
}
Result<int> count() { return not_built(); }
Result<std::unique_ptr<DeviceState>> open(const ContextOptions&) { return not_built(); }
Status check(const DeviceState&, void*) { return not_built(); }

}  // namespace

const DeviceKind kDevice = {count, open, check};

}  // namespace moire::cuda
