// Threads of a warp.
#pragma once

#include <cstdint>

namespace moire::cuda {

inline constexpr int kWarp = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFFU;

}  // namespace moire::cuda
