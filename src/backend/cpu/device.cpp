// The CPU as a device: its name, cores, and the instruction set that Highway dispatches to.
#include "backend/device.h"

#include <fstream>
#include <string>

#include "backend/cpu/findings.h"
#include "backend/cpu/simd.h"
#include "core/format.h"

namespace moire::cpu {
namespace {

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU";
}

Result<int> count() {
  if (!has_fused_multiply_add()) {
    return Status(Code::kUnsupported,
                  "context: the cpu backend needs fused multiply-add (AVX2 and FMA, or NEON); this "
                  "processor, " +
                      processor_name() + ", has none");
  }
  return 1;
}

Result<std::unique_ptr<DeviceState>> open(const ContextOptions& options) {
  auto state = std::make_unique<CpuState>();
  state->device = Device::kCpu;
  state->name = processor_name();
  state->num_threads = options.num_threads > 0 ? options.num_threads : available_cores();
  state->simd = simd_target();
  state->pool = std::make_unique<ThreadPool>(state->num_threads, options.parallel);
  state->num_threads = state->pool->num_threads();
  return std::unique_ptr<DeviceState>(std::move(state));
}

Status check(const DeviceState& state, void*) {
  std::string finding = findings_of(state).take();
  if (finding.empty()) return {};
  return {Code::kInvalidArgument, std::move(finding)};
}

}  // namespace

const DeviceKind kDevice = {count, open, check};

}  // namespace moire::cpu
