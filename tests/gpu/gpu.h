// What tests of the GPU itself share: a CUDA context, or a skip that says why there is none.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <moire/context.h>

#include <optional>
#include <string>

#include "tests/support/expect.h"
#include "tests/support/tested.h"

namespace moire::test {

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    ContextOptions options;
    options.device = Device::kCuda;
    Result<Context> context = Context::create(options);
    if (!context.ok()) GTEST_SKIP() << context.status().message();
    context_.emplace(std::move(context).value());
  }
  const Context& context() const { return *context_; }
  // Whether this is a GPU that the sm90 kernels are for.
  bool has_sm90() const {
    int major = 0, minor = 0;
    const int index = context_->options().index;
    EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index),
              cudaSuccess);
    return major == 9 && minor == 0;
  }

 private:
  std::optional<Context> context_;
};

// Tests of the kernels for compute capability 9.0.
class Hopper : public Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (!IsSkipped() && !has_sm90()) GTEST_SKIP() << "the kernels are for compute capability 9.0";
  }
  Tested alone() const { return Tested::alone(context()); }
  // With which words explain says how a call runs.
  template <class A>
  std::string policy(const A& args) const {
    const Context explaining = context().explaining();
    EXPECT_TRUE(succeeds(run(explaining, args)));
    return explaining.explanation().empty() ? "" : explaining.explanation()[0].policy;
  }
};

}  // namespace moire::test
