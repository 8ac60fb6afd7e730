// Scaffold: convert_glu on the CPU.
#include "backend/cpu/implementations.h"

namespace moire::cpu {

const Implementation<ConvertGluArgs> kConvertGlu = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const ConvertGluArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const ConvertGluArgs&) { return std::string(); },
    [](const Context&, const ConvertGluArgs&) { return Status(Code::kInternal, "scaffold"); }};

}  // namespace moire::cpu
