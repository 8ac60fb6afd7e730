// What tools/moire/power.cpp uses of libnvidia-ml, for one GPU that has no temperature.
#include <cstring>

#define MOIRE_FAKE extern "C" __attribute__((visibility("default")))

namespace {
int gpu;
}  // namespace

MOIRE_FAKE int nvmlInit_v2() { return 0; }

MOIRE_FAKE int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device) {
  *device = &gpu;
  return std::strcmp(bus_id, "0000:01:00.0") == 0 ? 0 : 6;
}

MOIRE_FAKE int nvmlDeviceGetTotalEnergyConsumption(void* device, unsigned long long* millijoules) {
  *millijoules = 123456789012ULL;
  return device == &gpu ? 0 : 2;
}

MOIRE_FAKE int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) {
  *milliwatts = 691500;
  return device == &gpu ? 0 : 2;
}

MOIRE_FAKE int nvmlDeviceGetClockInfo(void* device, int which, unsigned* megahertz) {
  *megahertz = which == 1 ? 1410 : 3201;
  return device == &gpu ? 0 : 2;
}
