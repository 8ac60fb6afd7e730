// Scaffold: grouped_gemm on the CPU.
#include "backend/cpu/implementations.h"

namespace moire::cpu {

const Implementation<GroupedGemmArgs> kGroupedGemm = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const GroupedGemmArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const GroupedGemmArgs&) { return std::string(); },
    [](const Context&, const GroupedGemmArgs&) { return Status(Code::kInternal, "scaffold"); }};

}  // namespace moire::cpu
