// Scaffold: splits_to_offsets on the CPU.
#include "backend/cpu/implementations.h"

namespace moire::cpu {

const Implementation<SplitsToOffsetsArgs> kSplitsToOffsets = {
    "cpu",
    Device::kCpu,
    [](const DeviceState&, const SplitsToOffsetsArgs&) { return Reason("scaffold"); },
    no_workspace,
    [](const DeviceState&, const SplitsToOffsetsArgs&) { return std::string(); },
    [](const Context&, const SplitsToOffsetsArgs&) { return Status(Code::kInternal, "scaffold"); }};

}  // namespace moire::cpu
