// Scaffold: glu, glu_backward on the CPU.
#include "backend/cpu/implementations.h"

namespace moire::cpu {

const Implementation<GluArgs> kGlu = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const GluArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const GluArgs&) { return std::string(); },
    [](const Context&, const GluArgs&) { return Status(Code::kInternal, "scaffold"); }};
const Implementation<GluBackwardArgs> kGluBackward = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const GluBackwardArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const GluBackwardArgs&) { return std::string(); },
    [](const Context&, const GluBackwardArgs&) { return Status(Code::kInternal, "scaffold"); }};

}  // namespace moire::cpu
