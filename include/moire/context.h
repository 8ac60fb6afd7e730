// Context: the only state there is. A small value: device, stream, threads, strictness, error
// record.
#pragma once

#include <moire/explain.h>
#include <moire/status.h>

#include <memory>
#include <string>
#include <string_view>

namespace moire {

enum class Device : int32_t { kCpu = MOIRE_CPU, kCuda = MOIRE_CUDA };

MOIRE_API std::string_view device_name(Device device);

class Communicator;  // expert_parallel.h

struct ContextOptions {
  Device device = Device::kCpu;
  int index = 0;
  int num_threads = 0;         // CPU: 0 = one per available core
  bool strict = false;         // fail where a slower implementation than the fastest would run
  std::string implementation;  // force one by name; empty = the first that supports the call
  void* stream = nullptr;      // CUDA: cudaStream_t
  // CPU: threads lent by the caller (see moire.h); null = threads of the context's own
  decltype(moire_context_options::parallel) parallel = nullptr;
  std::string plan_for;  // CUDA: a GPU that need not be here, "sm90"; such a context runs nothing
  std::shared_ptr<Communicator> communicator;  // of this device, or null: one rank of one
};

struct DeviceState;  // immutable facts and shared resources of one device; internal

// Copies share the device state. May be used by several threads; two streams are two contexts.
class MOIRE_API Context {
 public:
  // kUnsupported says which device is missing, and why.
  static Result<Context> create(const ContextOptions& options = {});

  Device device() const;
  const ContextOptions& options() const { return options_; }
  const DeviceState& state() const { return *state_; }

  // A context on the same device state with another stream, strictness or implementation; made
  // without touching the device. Device and index must be this context's.
  Result<Context> sharing(const ContextOptions& options) const;

  // A context on the same device that runs nothing: calls on it are validated and recorded in
  // explanation().
  Context explaining() const;
  bool is_explaining() const { return explanation_ != nullptr; }
  // The steps recorded so far; empty unless is_explaining().
  Explanation explanation() const;
  // For ops: appends a step to the record of an explaining context.
  void record(Step step) const;

  // What a finding in the data is said of: "grouped_mlp", "w1". Literals; empty: unsaid.
  struct Origin {
    std::string_view op, operand;

    // These names, and `own` for those unsaid.
    Origin over(const Origin& own) const {
      return {op.empty() ? own.op : op, operand.empty() ? own.operand : operand};
    }
  };
  // For ops that run others: a context whose findings are said of `origin`, unless an op that runs
  // this one has said another.
  Context within(const Origin& origin) const;
  const Origin& origin() const { return origin_; }

  // Waits for this context's work; returns and forgets the first error that the device reported.
  Status check() const;

 private:
  struct Record;
  Context(std::shared_ptr<const DeviceState> state, ContextOptions options);

  std::shared_ptr<const DeviceState> state_;
  std::shared_ptr<Record> explanation_;
  ContextOptions options_;
  Origin origin_;
};

// Devices that this build can use now.
MOIRE_API int device_count(Device device);
// What one device is, as JSON; kUnsupported where there is none.
MOIRE_API Result<std::string> device_info(Device device, int index);
// Version, compiler, backends, SIMD targets, as JSON.
MOIRE_API const std::string& build_info();

}  // namespace moire
