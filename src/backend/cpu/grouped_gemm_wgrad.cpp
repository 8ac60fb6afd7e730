// Scaffold: grouped_gemm_wgrad on the CPU.
#include "backend/cpu/implementations.h"

namespace moire::cpu {

const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const GroupedGemmWgradArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const GroupedGemmWgradArgs&) { return std::string(); },
    [](const Context&, const GroupedGemmWgradArgs&) {
      return Status(Code::kInternal, "scaffold");
    }};

}  // namespace moire::cpu
