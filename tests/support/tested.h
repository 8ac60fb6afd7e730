// The device under test. Tests of what ops compute run on tested(): a CPU context, or, where the
// environment has MOIRE_TEST_DEVICE=cuda, a CUDA context on which each call's memory is staged
// (staging/staged_call.h), with the implementation of MOIRE_TEST_IMPLEMENTATION forced if that is
// set.
//
// What the device does not support, the CPU computes, and the test says so; a test of which the
// device ran nothing is skipped, with the reason. Calls whose bits are compared run on one device
// all: see on_one_device().
//
// On a CPU a call that succeeds takes nothing from the heap, in any test.
#pragma once

#include <gtest/gtest.h>
#include <moire/context.h>
#include <moire/expert_parallel.h>
#include <moire/grouped_gemm.h>
#include <moire/grouped_mlp.h>
#include <moire/groups.h>
#include <moire/ops.h>
#include <moire/quantize.h>
#include <moire/routing.h>

#include <utility>

#include "staging/staged_call.h"
#include "tests/support/allocations.h"

namespace moire::test {

class Tested {
 public:
  Tested(const Context& context) : context_(context) {}  // as it is
  // Without the CPU's help: what the device does not support is an error.
  static Tested alone(const Context& context) {
    Tested out(context);
    out.unsupported_ = Unsupported::kIsReturned;
    return out;
  }
  // Alone, and with memory of its own, for ranks, which call at the same time.
  static Tested staged_by(staging::StagedCall& staged, const Context& context) {
    Tested out = alone(context);
    out.staged_ = &staged;
    return out;
  }
  // For data in which calls find what check() reports: a finding is a sentence, on the heap.
  static Tested finding(Tested out) {
    out.may_find_ = true;
    return out;
  }

  template <class Compare>
  friend void on_one_device(const Tested& device, Compare&& compare);

  Device device() const { return context_.device(); }
  // What check() says of data in which calls found something; on a device, the last call.
  Status check() const {
    if (device() == Device::kCpu) return context_.check();
    return (staged_ == nullptr ? staged_call() : *staged_).take_finding();
  }
  const Context& context() const { return context_; }

  // Calls take pointers to the host's memory, whatever the device; what is explained stays there.
  template <class A>
  Status call(const A& args, Status (*op)(const Context&, const A&)) const {
    if (context_.device() == Device::kCpu || context_.is_explaining()) {
      return without_heap([&] { return op(context_, args); });
    }
    staging::StagedCall& staged = staged_ == nullptr ? staged_call() : *staged_;
    const Status status = staged.run(context_, args, op);
    if (note(status) || unsupported_ == Unsupported::kIsReturned) return status;
    if (unsupported_ == Unsupported::kIsThrown) throw NotOnDevice();
    const Context cpu = Context::create().value();
    Status of_cpu = op(cpu, args);
    staged.keep_finding(cpu.check());
    return of_cpu;
  }
  template <class A>
  Status size(const A& args, size_t* bytes, Status (*op)(const Context&, const A&, size_t*)) const {
    const Status status = without_heap([&] { return op(context_, args, bytes); });
    if (status.code() != Code::kUnsupported) return status;
    if (unsupported_ == Unsupported::kIsReturned) return status;
    if (unsupported_ == Unsupported::kIsThrown) throw NotOnDevice();
    return op(Context::create().value(), args, bytes);
  }

 private:
  // What becomes of a call that the device does not support.
  enum class Unsupported { kRunsOnCpu, kIsReturned, kIsThrown };
  struct NotOnDevice {};

  template <class Call>
  Status without_heap(Call&& call) const {
    const int64_t before = num_allocations();
    Status status = call();
    if (status.ok() && context_.device() == Device::kCpu && !context_.is_explaining() &&
        !may_find_) {
      EXPECT_EQ(num_allocations() - before, 0) << "taken from the heap by the call";
    }
    return status;
  }
  static staging::StagedCall& staged_call();
  // Counts a call of the device; false if it is not supported there.
  static bool note(const Status& status);

  Context context_;
  staging::StagedCall* staged_ = nullptr;
  Unsupported unsupported_ = Unsupported::kRunsOnCpu;
  bool may_find_ = false;
};

// Runs what compares the bits of calls, which devices need not share, with all calls on one device:
// on this one, or, where it does not support one of them, once more from the start on a CPU.
template <class Compare>
void on_one_device(const Tested& device, Compare&& compare) {
  Tested all = device;
  all.unsupported_ = Tested::Unsupported::kIsThrown;
  try {
    return compare(std::as_const(all));
  } catch (const Tested::NotOnDevice&) {
    all.context_ = Context::create().value();
  }
  compare(std::as_const(all));
}

// The context under test; 0 threads = one per core, where it is the CPU's.
Tested tested(int num_threads = 0);
Device tested_device();

// The ops on it. Tests call these by the ops' own names.
#define MOIRE_TESTED_OP(name)                                                     \
  inline Status name(const Tested& context, const Args<moire_##name##_args>& a) { \
    return context.call(a, moire::name);                                          \
  }
#define MOIRE_TESTED_OP_WITH_WORKSPACE(name)                                                \
  MOIRE_TESTED_OP(name)                                                                     \
  inline Status name##_workspace(const Tested& context, const Args<moire_##name##_args>& a, \
                                 size_t* bytes) {                                           \
    return context.size(a, bytes, moire::name##_workspace);                                 \
  }
MOIRE_FOR_EACH_OP(MOIRE_TESTED_OP, MOIRE_TESTED_OP_WITH_WORKSPACE)
#undef MOIRE_TESTED_OP_WITH_WORKSPACE
#undef MOIRE_TESTED_OP

}  // namespace moire::test
