// The devices that this build can open; one table entry per kind (context.cpp).
#pragma once

#include <moire/context.h>

#include <memory>

#include "core/device_state.h"

namespace moire {

struct DeviceKind {
  // Usable devices; a Status where the kind cannot be used at all (no driver, no instruction set),
  // with the reason.
  Result<int> (*count)();
  Result<std::unique_ptr<DeviceState>> (*open)(const ContextOptions& options);
  // Waits for the context's work; the first error that the device reported.
  Status (*check)(const DeviceState& state, void* stream);
  // What the device of that name would be, without touching any; null: this kind has none to plan
  // for.
  Result<std::unique_ptr<DeviceState>> (*plan)(std::string_view name) = nullptr;
};

namespace cpu {
extern const DeviceKind kDevice;
}
namespace cuda {
extern const DeviceKind kDevice;  // by backend/cuda/runtime, or by its absence (no_cuda.cpp)
}

}  // namespace moire
