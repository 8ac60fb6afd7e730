// What tests of the GPU itself share: a CUDA context, or a skip that says why there is none.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <moire/context.h>

#include <optional>
#include <string>

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

}  // namespace moire::test
