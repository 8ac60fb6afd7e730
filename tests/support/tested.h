// The device under test. Tests of what ops compute run on tested(): a CPU context, or, where the
// environment has MOIRE_TEST_DEVICE=cuda, a CUDA context on which each call's memory is staged
// (staging/staged_call.h), with the implementation of MOIRE_TEST_IMPLEMENTATION forced if that is
// set.
//
// What the device does not support, the CPU computes, and the test says so; a test of which the
// device ran nothing is skipped, with the reason.
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

#include "staging/staged_call.h"
#include "tests/support/allocations.h"

namespace moire::test {

class Tested {
 public:
  Tested(const Context& context) : context_(context) {}  // as it is
  // Without the CPU's help: what the device does not support is an error.
  static Tested alone(const Context& context) {
    Tested out(context);
    out.is_alone_ = true;
    return out;
  }
  // For data in which calls find what check() reports: a finding is a sentence, on the heap.
  static Tested finding(Tested out) {
    out.may_find_ = true;
    return out;
  }

  Device device() const { return context_.device(); }
  const Context& context() const { return context_; }

  // Calls take pointers to the host's memory, whatever the device; what is explained stays there.
  template <class A>
  Status call(const A& args, Status (*op)(const Context&, const A&)) const {
    if (context_.device() == Device::kCpu || context_.is_explaining()) {
      return without_heap([&] { return op(context_, args); });
    }
    const Status status = staged_call().run(context_, args, op);
    return note(status) || is_alone_ ? status : op(Context::create().value(), args);
  }
  template <class A>
  Status size(const A& args, size_t* bytes, Status (*op)(const Context&, const A&, size_t*)) const {
    const Status status = without_heap([&] { return op(context_, args, bytes); });
    if (is_alone_ || status.code() != Code::kUnsupported) return status;
    return op(Context::create().value(), args, bytes);
  }

 private:
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
  bool is_alone_ = false;
  bool may_find_ = false;
};

// The context under test; 0 threads = one per core, where it is the CPU's.
Tested tested(int num_threads = 0);

// Whether the CPU computed a part of the running test for a device that does not support it.
bool cpu_has_helped();

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
