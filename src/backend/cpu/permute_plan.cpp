// Scaffold: permute_plan on the CPU.
#include "backend/cpu/implementations.h"

namespace moire::cpu {

const Implementation<PermutePlanArgs> kPermutePlan = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const PermutePlanArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const PermutePlanArgs&) { return std::string(); },
    [](const Context&, const PermutePlanArgs&) { return Status(Code::kInternal, "scaffold"); }};

}  // namespace moire::cpu
