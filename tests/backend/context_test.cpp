// Contexts: what can be opened, what is said when it cannot.
#include <gtest/gtest.h>
#include <moire/context.h>
#include <moire/glu.h>

#include <vector>

namespace moire {
namespace {

TEST(Context, OpensTheCpuWithTheThreadsAskedFor) {
  ContextOptions options;
  options.num_threads = 3;
  const auto context = Context::create(options);
  ASSERT_TRUE(context.ok()) << context.status().message();
  EXPECT_EQ(context.value().device(), Device::kCpu);
  EXPECT_EQ(context.value().options().num_threads, 3);
  EXPECT_TRUE(context.value().check().ok());
}

TEST(Context, RefusesDevicesThatAreNotThereWithTheReason) {
  ContextOptions options;
  options.index = 7;
  EXPECT_EQ(Context::create(options).status().message(),
            "context: there is no cpu device 7: this machine has 1");
  options = {};
  options.num_threads = -1;
  EXPECT_EQ(Context::create(options).status().message(),
            "context: num_threads is -1, must be 0 (all cores) to 4096");
  options = {};
  options.device = static_cast<Device>(9);
  EXPECT_EQ(Context::create(options).status().code(), Code::kInvalidArgument);
  if (device_count(Device::kCuda) == 0) {
    options.device = Device::kCuda;
    const Status status = Context::create(options).status();
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find("CUDA"), std::string::npos) << status.message();
  }
}

TEST(Context, SharesItsDeviceWithAnotherOfOtherOptions) {
  const Context context = Context::create().value();
  ContextOptions options;
  options.strict = true;
  const auto shared = context.sharing(options);
  ASSERT_TRUE(shared.ok()) << shared.status().message();
  EXPECT_EQ(&shared.value().state(), &context.state());
  EXPECT_TRUE(shared.value().options().strict);
  options.device = Device::kCuda;
  options.index = 2;
  EXPECT_EQ(context.sharing(options).status().message(),
            "context: asked for cuda device 2 but the context that it shares is of cpu device 0");
}

TEST(Context, AnOpSaysThatNoThreadWasLent) {
  ContextOptions options;
  options.num_threads = 2;
  options.parallel = [](void (*)(void*), void*, unsigned, unsigned) {};
  const Context context = Context::create(options).value();
  std::vector<float> z(512 * 512), act(512 * 256);
  GluArgs args;
  args.z = TensorView(z.data(), DType::kFP32, {512, 512});
  args.act = TensorView(act.data(), DType::kFP32, {512, 256});
  const Status status = glu(context, args);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "glu: the context's `parallel` returned without a call of its body, needs at least "
            "one; what the outputs hold is not defined");
}

TEST(Context, DescribesDevicesAndBuildAsJson) {
  const auto info = device_info(Device::kCpu, 0);
  ASSERT_TRUE(info.ok());
  EXPECT_NE(info.value().find("\"simd\""), std::string::npos);
  EXPECT_EQ(device_count(Device::kCpu), 1);
  EXPECT_NE(build_info().find("\"version\""), std::string::npos);
}

TEST(Context, ExplainingOneRecordsAndIsACopy) {
  const Context context = Context::create().value();
  EXPECT_FALSE(context.is_explaining());
  const Context explaining = context.explaining();
  explaining.record({.op = "glu", .problem = "\"quoted\"", .implementation = "cpu", .policy = ""});
  EXPECT_EQ(explaining.explanation().size(), 1U);
  EXPECT_TRUE(context.explanation().empty());
  EXPECT_NE(to_json(explaining.explanation()).find("\\\"quoted\\\""), std::string::npos);
}

}  // namespace
}  // namespace moire
