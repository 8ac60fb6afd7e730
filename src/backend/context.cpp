// Context: opening a device, and the record of an explaining context; what devices and this build
// are.
#include <moire/context.h>
#include <moire/expert_parallel.h>

#include <mutex>

#include "backend/device.h"
#include "core/format.h"
#include "core/status_macros.h"

namespace moire {
namespace {

const DeviceKind* kind_of(Device device) {
  return device == Device::kCpu    ? &cpu::kDevice
         : device == Device::kCuda ? &cuda::kDevice
                                   : nullptr;
}

Status check_communicator(const ContextOptions& options) {
  const Communicator* const c = options.communicator.get();
  if (c == nullptr || (c->device() == options.device && c->index() == options.index)) return {};
  return invalid("context", "its communicator is of ", device_name(c->device()), " device ",
                 c->index(), " but the device is ", device_name(options.device), " ",
                 options.index);
}

Result<std::unique_ptr<DeviceState>> open(const DeviceKind& kind, const ContextOptions& options) {
  if (!options.plan_for.empty()) {
    if (kind.plan != nullptr) return kind.plan(options.plan_for);
    return invalid("context", "plan_for is \"", options.plan_for, "\" but the device is ",
                   device_name(options.device), ", must be cuda");
  }
  const Result<int> count = kind.count();
  if (!count.ok()) return count.status();
  if (options.index < 0 || options.index >= count.value()) {
    return invalid("context", "there is no ", device_name(options.device), " device ",
                   options.index, ": this machine has ", count.value());
  }
  return kind.open(options);
}

}  // namespace

std::string_view device_name(Device device) { return device == Device::kCuda ? "cuda" : "cpu"; }

struct Context::Record {
  std::mutex mutex;
  Explanation steps;
};

Context::Context(std::shared_ptr<const DeviceState> state, ContextOptions options)
    : state_(std::move(state)), options_(std::move(options)) {}

Result<Context> Context::create(const ContextOptions& options) {
  const DeviceKind* kind = kind_of(options.device);
  if (kind == nullptr) {
    return invalid("context", "device kind ", static_cast<int32_t>(options.device),
                   ", must be 0 (cpu) or 1 (cuda)");
  }
  constexpr int kMostThreads = 4096;
  if (options.num_threads < 0 || options.num_threads > kMostThreads) {
    return invalid("context", "num_threads is ", options.num_threads, ", must be 0 (all cores) to ",
                   kMostThreads);
  }
  MOIRE_RETURN_IF_ERROR(check_communicator(options));
  Result<std::unique_ptr<DeviceState>> state = open(*kind, options);
  if (!state.ok()) return state.status();
  return Context(std::move(state).value(), options);
}

Result<Context> Context::sharing(const ContextOptions& options) const {
  if (options.plan_for != options_.plan_for) {
    return invalid("context", "plan_for is \"", options.plan_for,
                   "\" but that of the context that it shares is \"", options_.plan_for,
                   "\", must be the same");
  }
  if (options.device != device() || options.index != state_->index) {
    return invalid("context", "asked for ", device_name(options.device), " device ", options.index,
                   " but the context that it shares is of ", device_name(device()), " device ",
                   state_->index);
  }
  MOIRE_RETURN_IF_ERROR(check_communicator(options));
  return Context(state_, options);
}

Device Context::device() const { return state_->device; }

Context Context::explaining() const {
  Context copy = *this;
  copy.explanation_ = std::make_shared<Record>();
  return copy;
}

Context Context::within(const Origin& origin) const {
  Context copy = *this;
  copy.origin_ = origin_.over(origin);
  return copy;
}

Explanation Context::explanation() const {
  if (explanation_ == nullptr) return {};
  const std::lock_guard lock(explanation_->mutex);
  return explanation_->steps;
}

void Context::record(Step step) const {
  if (explanation_ == nullptr) return;
  const std::lock_guard lock(explanation_->mutex);
  explanation_->steps.push_back(std::move(step));
}

Status Context::check() const {
  if (state_->is_planned) return {};  // nothing has run
  return kind_of(device())->check(*state_, options_.stream);
}

int device_count(Device device) {
  const DeviceKind* kind = kind_of(device);
  if (kind == nullptr) return 0;
  const Result<int> count = kind->count();
  return count.ok() ? count.value() : 0;
}

Result<std::string> device_info(Device device, int index) {
  ContextOptions options;
  options.device = device;
  options.index = index;
  const Result<Context> context = Context::create(options);
  if (!context.ok()) return context.status();
  const DeviceState& s = context.value().state();
  std::string json = concat("{\"device\": ", json_quote(device_name(device)),
                            ", \"index\": ", index, ", \"name\": ", json_quote(s.name));
  if (device == Device::kCpu) {
    json += concat(", \"threads\": ", s.num_threads, ", \"simd\": ", json_quote(s.simd));
  } else {
    json += concat(", \"compute_capability\": ", s.compute_capability,
                   ", \"multiprocessors\": ", s.num_multiprocessors,
                   ", \"memory_bytes\": ", s.memory_bytes);
  }
  return json + "}";
}

const std::string& build_info() {
  static const std::string json = concat("{\"version\": ", json_quote(MOIRE_VERSION_STRING),
                                         ", \"compiler\": ", json_quote(MOIRE_COMPILER),
                                         ", \"build_type\": ", json_quote(MOIRE_BUILD_TYPE),
                                         ", \"cuda\": ", json_quote(MOIRE_CUDA_BUILD), "}");
  return json;
}

}  // namespace moire
