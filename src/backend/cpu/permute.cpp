// Scaffold: permute on the CPU.
#include "backend/cpu/implementations.h"

namespace moire::cpu {

const Implementation<PermuteArgs> kPermute = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const PermuteArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const PermuteArgs&) { return std::string(); },
    [](const Context&, const PermuteArgs&) { return Status(Code::kInternal, "scaffold"); }};

}  // namespace moire::cpu
