// Scaffold: router, router_backward on the CPU.
#include "backend/cpu/implementations.h"

namespace moire::cpu {

const Implementation<RouterArgs> kRouter = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const RouterArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const RouterArgs&) { return std::string(); },
    [](const Context&, const RouterArgs&) { return Status(Code::kInternal, "scaffold"); }};
const Implementation<RouterBackwardArgs> kRouterBackward = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const RouterBackwardArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const RouterBackwardArgs&) { return std::string(); },
    [](const Context&, const RouterBackwardArgs&) { return Status(Code::kInternal, "scaffold"); }};

}  // namespace moire::cpu
