// What tests of the GPU itself share: a CUDA context, or a skip that says why there is none.
#pragma once

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

 private:
  std::optional<Context> context_;
};

}  // namespace moire::test
