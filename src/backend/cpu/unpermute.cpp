// Scaffold: unpermute, unpermute_backward on the CPU.
#include "backend/cpu/implementations.h"

namespace moire::cpu {

const Implementation<UnpermuteArgs> kUnpermute = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const UnpermuteArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const UnpermuteArgs&) { return std::string(); },
    [](const Context&, const UnpermuteArgs&) { return Status(Code::kInternal, "scaffold"); }};
const Implementation<UnpermuteBackwardArgs> kUnpermuteBackward = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const UnpermuteBackwardArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const UnpermuteBackwardArgs&) { return std::string(); },
    [](const Context&, const UnpermuteBackwardArgs&) {
      return Status(Code::kInternal, "scaffold");
    }};

}  // namespace moire::cpu
