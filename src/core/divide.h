// Divisions that round up, of numbers that are not negative. Host and device.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace moire {

MOIRE_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
MOIRE_HOST_DEVICE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace moire
