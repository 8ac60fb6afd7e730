// The walk over an op's implementations: the first that supports the call runs, and what does not
// run is never silent.
#include "ops/dispatch.h"

#include <gtest/gtest.h>

namespace moire {
namespace {

// An op with three implementations: one for a GPU, a fast one that takes even values only, a slow
// one for all but 13.
struct ToyArgs {
  int value = 0;
  std::string* ran = nullptr;
  TensorView in, out;
};
void visit_fields(const ToyArgs& a, auto&& v) {
  v.field("in", a.in, Role::kIn, "C");
  v.field("out", a.out, Role::kOut, "C");
}

template <int kWhich>
Status run_toy(const Context&, const ToyArgs& args) {
  *args.ran = kWhich == 0 ? "sm90" : kWhich == 1 ? "fast" : "slow";
  return {};
}
std::string toy_policy(const DeviceState&, const ToyArgs&) { return "toy"; }

}  // namespace

template <>
std::span<const Implementation<ToyArgs>> implementations() {
  static const Implementation<ToyArgs> list[] = {
      {"sm90", Device::kCuda, supports_everything, no_workspace, toy_policy, run_toy<0>},
      {"fast", Device::kCpu,
       [](const DeviceState&, const ToyArgs& a) {
         return a.value % 2 == 0 ? Reason() : Reason("value is odd");
       },
       no_workspace, toy_policy, run_toy<1>},
      {"slow", Device::kCpu,
       [](const DeviceState&, const ToyArgs& a) {
         return a.value != 13 ? Reason() : Reason("value is 13");
       },
       [](const DeviceState&, const ToyArgs& a) {
         return static_cast<size_t>(a.value == 5 ? 64 : 0);
       },
       toy_policy, run_toy<2>},
  };
  return list;
}

namespace {

constexpr Op<ToyArgs> kToy{"toy",
                           [](ArgumentCheck& check, const ToyArgs& a) {
                             check.require(a.value >= 0, "value is negative");
                           },
                           [](const ToyArgs&) { return std::string("a toy"); }};

class Dispatch : public testing::Test {
 protected:
  Status call(int value, int64_t size = 4) {
    uint8_t in[3], out[4];
    const ToyArgs args{value, &ran_, TensorView(in, DType::kUint8, {3}), out_of(out, size)};
    const Context context = explaining_ ? *explaining_ : Context::create(options_).value();
    return kToy.run(context, args);
  }
  static TensorView out_of(uint8_t* out, int64_t size) {
    return size < 0 ? TensorView() : TensorView(out, DType::kUint8, {size});
  }
  ContextOptions options_;
  std::optional<Context> explaining_;
  std::string ran_;
};

TEST_F(Dispatch, RunsTheFirstThatSupportsTheCallOnThisDevice) {
  EXPECT_TRUE(call(2).ok());
  EXPECT_EQ(ran_, "fast");
  EXPECT_TRUE(call(3).ok());
  EXPECT_EQ(ran_, "slow");
}

TEST_F(Dispatch, SaysWhyNoneTakesTheCall) {
  const Status status = call(13);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_EQ(status.message(),
            "toy: no implementation on cpu takes this call; fast: value is odd; slow: value is 13");
  EXPECT_EQ(ran_, "");
}

TEST_F(Dispatch, StrictRefusesTheSlowerOne) {
  options_.strict = true;
  EXPECT_TRUE(call(2).ok());
  ran_.clear();
  EXPECT_EQ(call(3).message(),
            "toy: strict, but the fastest implementation was refused; fast: value is odd");
  EXPECT_EQ(ran_, "");
}

TEST_F(Dispatch, RunsTheOneThatIsForced) {
  options_.implementation = "slow";
  EXPECT_TRUE(call(2).ok());
  EXPECT_EQ(ran_, "slow");
  options_.implementation = "none";
  EXPECT_EQ(call(2).code(), Code::kUnsupported);
}

TEST_F(Dispatch, AForcedNameRulesOutOthersButNotTheOnlyOneForCuda) {
  EXPECT_FALSE(is_ruled_out("", "sm90"));
  EXPECT_FALSE(is_ruled_out("sm90", "sm90"));
  EXPECT_TRUE(is_ruled_out("portable", "sm90"));
  EXPECT_TRUE(is_ruled_out("sm90", "cpu"));
  EXPECT_FALSE(is_ruled_out("portable", "cuda"));
}

TEST_F(Dispatch, RefusesATooSmallWorkspace) {
  EXPECT_EQ(call(5).message(), "toy: the workspace has 0 bytes, needs 64");
  EXPECT_EQ(ran_, "");
}

TEST_F(Dispatch, ACallThatWritesNothingRunsNothing) {
  EXPECT_TRUE(call(2, 0).ok());
  EXPECT_EQ(ran_, "");
  EXPECT_EQ(call(13, 0).code(), Code::kUnsupported) << "it is checked all the same";
}

TEST_F(Dispatch, ACallWithoutAnOutputIsRefused) {
  EXPECT_EQ(call(2, -1).message(), "toy: there is nothing to do: out must be present");
  EXPECT_EQ(call(-1, -1).message(), "toy: value is negative") << "what it was given comes first";
  EXPECT_EQ(ran_, "");
}

TEST_F(Dispatch, ExplainingRecordsAndRunsNothing) {
  explaining_ = Context::create(options_).value().explaining();
  EXPECT_TRUE(call(3).ok());
  EXPECT_EQ(ran_, "");
  const Explanation steps = explaining_->explanation();
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(steps[0].implementation, "slow");
  EXPECT_EQ(steps[0].problem, "a toy");
  EXPECT_EQ(steps[0].policy, "toy");
  EXPECT_EQ(steps[0].bytes_read, 3);
  EXPECT_EQ(steps[0].bytes_written, 4);
  ASSERT_EQ(steps[0].refused.size(), 1U);
  EXPECT_EQ(steps[0].refused[0].reason, "value is odd");
}

}  // namespace
}  // namespace moire
