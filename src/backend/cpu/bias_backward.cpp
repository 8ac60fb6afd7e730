// Scaffold: bias_backward on the CPU.
#include "backend/cpu/implementations.h"

namespace moire::cpu {

const Implementation<BiasBackwardArgs> kBiasBackward = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const BiasBackwardArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const BiasBackwardArgs&) { return std::string(); },
    [](const Context&, const BiasBackwardArgs&) { return Status(Code::kInternal, "scaffold"); }};

}  // namespace moire::cpu
