#include "text.h"

#include <cmath>
#include <cstdio>

namespace moire::tool {
namespace {

std::string with_unit(double value, const char* unit) {
  char buffer[48];
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  std::snprintf(buffer, sizeof(buffer), "%.*f%s%s", decimals, value, *unit != 0 ? " " : "", unit);
  return buffer;
}

}  // namespace

std::string human_bytes(double bytes) {
  static const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 6; ++unit) bytes /= 1024;
  if (unit == 0) return std::to_string(static_cast<int64_t>(bytes)) + " B";
  return with_unit(bytes, units[unit]);
}

std::string human_seconds(double seconds) {
  if (seconds < 1e-6) return with_unit(seconds * 1e9, "ns");
  if (seconds < 1e-3) return with_unit(seconds * 1e6, "us");
  if (seconds < 1) return with_unit(seconds * 1e3, "ms");
  return with_unit(seconds, "s");
}

std::string human_number(double value) {
  if (value != 0 && (std::fabs(value) < 0.01 || std::fabs(value) >= 1e6)) {
    char buffer[32];
    std::snprintf(buffer, sizeof(buffer), "%.2e", value);
    return buffer;
  }
  return with_unit(value, "");
}

}  // namespace moire::tool
