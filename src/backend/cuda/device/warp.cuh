// Threads of a warp.
#pragma once

namespace moire::cuda {

inline constexpr int kWarp = 32;

}  // namespace moire::cuda
