// Scaffold: grouped_gemm_glu_backward on the CPU.
#include "backend/cpu/implementations.h"

namespace moire::cpu {

const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const GroupedGemmGluBackwardArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const GroupedGemmGluBackwardArgs&) { return std::string(); },
    [](const Context&, const GroupedGemmGluBackwardArgs&) {
      return Status(Code::kInternal, "scaffold");
    }};

}  // namespace moire::cpu
