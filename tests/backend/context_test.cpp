// Contexts: what can be opened, what is said when it cannot.
#include <gtest/gtest.h>
#include <moire/context.h>
#include <moire/glu.h>

#include <algorithm>
#include <vector>

#include "tests/support/tensors.h"

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

ContextOptions planning_for(const std::string& gpu) {
  ContextOptions options;
  options.device = Device::kCuda;
  options.plan_for = gpu;
  return options;
}

bool is_built_with_cuda() {
  const auto all = available_implementations();
  return std::any_of(all.begin(), all.end(),
                     [](const auto& found) { return found.device == "cuda"; });
}

TEST(Context, PlansNeedABuildWithCudaAndAGpuItKnows) {
  ContextOptions options = planning_for("sm90");
  options.device = Device::kCpu;
  EXPECT_EQ(Context::create(options).status().message(),
            "context: plan_for is \"sm90\" but the device is cpu, must be cuda");
  const Status status = Context::create(planning_for("sm70")).status();
  if (is_built_with_cuda()) {
    EXPECT_EQ(status.message(),
              "context: plan_for is \"sm70\", must be one of sm80, sm86, sm89, sm90, sm100, sm120");
  } else {
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_EQ(status.message().find(
                  "context: asked for a CUDA device, but this build of moire is for CPUs only"),
              0U)
        << status.message();
  }
  EXPECT_EQ(Context::create().value().sharing(options).status().message(),
            "context: plan_for is \"sm90\" but that of the context that it shares is \"\", must be "
            "the same");
}

TEST(Context, ExplainsForAGpuThatIsNotHereAndRunsNothingOnIt) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  const Context context = Context::create(planning_for("sm90")).value();
  EXPECT_EQ(context.device(), Device::kCuda);
  EXPECT_TRUE(context.check().ok());
  const test::TestTensor z(DType::kFP32, {2, 4}), act(DType::kFP32, {2, 2});
  GluArgs args;
  args.z = z.view();
  args.act = act.view();
  EXPECT_EQ(glu(context, args).message(),
            "glu: the context plans for sm90, on which nothing runs; needs an explaining context, "
            "or a device");
  const Context explaining = context.explaining();
  ASSERT_TRUE(glu(explaining, args).ok());
  EXPECT_EQ(explaining.explanation().at(0).implementation, "cuda");
}

TEST(Context, DescribesDevicesAndBuildAsJson) {
  const auto info = device_info(Device::kCpu, 0);
  ASSERT_TRUE(info.ok());
  EXPECT_NE(info.value().find("\"simd\""), std::string::npos);
  EXPECT_EQ(info.value().find("AVX3"), std::string::npos) << "a name of Highway's alone";
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
