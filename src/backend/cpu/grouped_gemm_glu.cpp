// Scaffold: grouped_gemm_glu on the CPU.
#include "backend/cpu/implementations.h"

namespace moire::cpu {

const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const GroupedGemmGluArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const GroupedGemmGluArgs&) { return std::string(); },
    [](const Context&, const GroupedGemmGluArgs&) { return Status(Code::kInternal, "scaffold"); }};

}  // namespace moire::cpu
