// CUDA in a build without it: every request says so.
#include "backend/device.h"
#include "core/format.h"
#include "parallel/peers.h"

namespace moire::cuda {
namespace {

Status not_built(std::string_view call = "context") {
  return {Code::kUnsupported,
          concat(call,
                 ": asked for a CUDA device, but this build of moire is for CPUs only, "
                 "because " MOIRE_NO_CUDA_REASON
                 "; build it again with nvcc on the PATH or named by CUDACXX")};
}
Result<int> count() { return not_built(); }
Result<std::unique_ptr<DeviceState>> open(const ContextOptions&) { return not_built(); }
Status check(const DeviceState&, void*) { return not_built(); }
Result<std::unique_ptr<DeviceState>> plan(std::string_view) { return not_built(); }

}  // namespace

Result<std::vector<std::unique_ptr<Peers>>> thread_peers(const CommunicatorOptions&) {
  return not_built(kCommunicator);
}
Result<std::unique_ptr<Peers>> nccl_peers(const CommunicatorOptions&) {
  return not_built(kCommunicator);
}

const DeviceKind kDevice = {count, open, check, plan};

}  // namespace moire::cuda
