// Every C entry with a heap that fails after 0, 1, 2, ... allocations: MOIRE_OUT_OF_MEMORY, never
// an abort, and outputs untouched.
#include <gtest/gtest.h>
#include <moire.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/allocations.h"
#include "tests/support/expect.h"
#include "tests/support/mlp_problem.h"

namespace moire::test {
namespace {

// `want` is what the entry returns with memory enough, or where it can do without what it lacks.
void expect_survival(const std::string& name, int32_t want, const std::function<int32_t()>& entry,
                     const std::function<bool()>& is_untouched) {
  SCOPED_TRACE(name);
  int32_t code = MOIRE_OK;
  const auto call = [&] { code = entry(); };
  int64_t n = 0;
  while (runs_out_of_memory(n, call)) {
    ASSERT_LT(n, 10000);
    if (code != want) {
      ASSERT_EQ(code, MOIRE_OUT_OF_MEMORY) << n << " allocations: " << moire_last_error();
      ASSERT_STREQ(moire_last_error(), "out of host memory");
      ASSERT_TRUE(is_untouched()) << n << " allocations";
    }
    ++n;
  }
  EXPECT_EQ(code, want) << moire_last_error();
}

bool nothing_to_touch() { return true; }

class OutOfMemory : public testing::Test {
 protected:
  OutOfMemory() : context_(make()) {}
  ~OutOfMemory() override {
    moire_context_destroy(explaining_);
    moire_context_destroy(context_);
  }

  static moire_context* make() {
    moire_context_options options{};
    options.struct_size = sizeof(options);
    options.num_threads = 3;
    moire_context* context = nullptr;
    moire_context_create(&options, &context);
    return context;
  }

  moire_context* context_;
  moire_context* explaining_ = nullptr;
};

TEST_F(OutOfMemory, WhileContextsAreMade) {
  moire_context* made = nullptr;
  const auto is_null = [&] { return made == nullptr; };
  const auto destroyed = [&](int32_t code) {
    moire_context_destroy(made);
    made = nullptr;
    return code;
  };
  moire_context_options options{};
  options.struct_size = sizeof(options);
  options.num_threads = 3;
  expect_survival(
      "create", MOIRE_OK, [&] { return destroyed(moire_context_create(&options, &made)); },
      is_null);
  options.implementation = "a name that is too long to lie inside a string";
  options.sharing = context_;
  expect_survival(
      "sharing", MOIRE_OK, [&] { return destroyed(moire_context_create(&options, &made)); },
      is_null);
  options.num_threads = -1;
  options.sharing = nullptr;
  expect_survival(
      "refused", MOIRE_INVALID_ARGUMENT, [&] { return moire_context_create(&options, &made); },
      is_null);
  expect_survival(
      "explaining", MOIRE_OK, [&] { return destroyed(moire_context_explaining(context_, &made)); },
      is_null);
  size_t needed = 0;
  expect_survival(
      "device_info", MOIRE_OK, [&] { return moire_device_info(MOIRE_CPU, 0, nullptr, 0, &needed); },
      nothing_to_touch);
}

// A layer that quantises and meets a NaN, which it says in a sentence; what explain says of it.
TEST_F(OutOfMemory, WhileALayerRunsAndIsExplained) {
  MlpOptions options;
  options.ragged = {"Uneven", {40, 0, 33}, 3};
  options.dtype = DType::kBF16;
  options.in_8_bits = true;
  options.listed = true;
  Random random;
  const MlpProblem p(options, random);
  TestTensor x = p.x, y = p.y;
  const TestTensor untouched = p.y;
  x.set(1, 1, std::nan(""));
  GroupedMlpArgs args = p.forward();
  args.x = x;
  args.y = y;
  args.recipe = MOIRE_RECIPE_MXFP8;
  size_t bytes = 0;
  expect_survival(
      "workspace", MOIRE_OK, [&] { return moire_grouped_mlp_workspace(context_, &args, &bytes); },
      nothing_to_touch);
  const TestWorkspace workspace(bytes);
  args.workspace = workspace.get();
  const auto is_untouched = [&] { return static_cast<bool>(same_bits(y, untouched)); };
  ASSERT_EQ(moire_context_explaining(context_, &explaining_), MOIRE_OK);
  expect_survival(
      "explaining", MOIRE_OK, [&] { return moire_grouped_mlp(explaining_, &args); }, is_untouched);
  size_t needed = 0;
  expect_survival(
      "explanation", MOIRE_OK, [&] { return moire_explanation(explaining_, nullptr, 0, &needed); },
      nothing_to_touch);
  EXPECT_TRUE(is_untouched());
  expect_survival(
      "grouped_mlp", MOIRE_OK, [&] { return moire_grouped_mlp(context_, &args); }, is_untouched);
  EXPECT_EQ(moire_context_check(context_), MOIRE_INVALID_ARGUMENT)
      << "the NaN is told all the same";
  EXPECT_STREQ(moire_last_error(), "something quantised is infinite or NaN");

  y.poison();
  args.tail = 7;
  expect_survival(
      "refused", MOIRE_INVALID_ARGUMENT, [&] { return moire_grouped_mlp(context_, &args); },
      is_untouched);
}

}  // namespace
}  // namespace moire::test
