// What every C entry does with what no C++ caller can give it: null, wrong sizes, older structs;
// and the message that a failure leaves.
#include <gtest/gtest.h>
#include <moire.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/allocations.h"

namespace moire {
namespace {

testing::AssertionResult fails(int32_t code, int32_t want, const std::string& text) {
  const std::string message = moire_last_error();
  if (code == want && message.find(text) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "got " << moire_code_name(code) << ": \"" << message
                                     << "\"\nwant " << moire_code_name(want) << ": \"" << text;
}

// One op's entry, whatever its struct.
struct Entry {
  std::string name;
  size_t struct_size;
  std::function<int32_t(const moire_context*, const void*)> call;
  std::function<int32_t(const moire_context*, const void*, size_t*)> workspace;  // may be empty
};

std::vector<Entry> entries() {
  std::vector<Entry> out;
#define OP(name)                                                                                \
  out.push_back({"moire_" #name, sizeof(moire_##name##_args),                                   \
                 [](const moire_context* context, const void* args) {                           \
                   return moire_##name(context, static_cast<const moire_##name##_args*>(args)); \
                 },                                                                             \
                 nullptr});
#define OP_WITH_WORKSPACE(name)                                                              \
  OP(name)                                                                                   \
  out.back().workspace = [](const moire_context* context, const void* args, size_t* bytes) { \
    return moire_##name##_workspace(context, static_cast<const moire_##name##_args*>(args),  \
                                    bytes);                                                  \
  };
#include "tests/capi/abi.inc"
  return out;
}

class CBoundary : public testing::Test {
 protected:
  CBoundary() {
    moire_context_options options{};
    options.struct_size = sizeof(options);
    options.num_threads = 2;
    EXPECT_EQ(moire_context_create(&options, &context_), MOIRE_OK) << moire_last_error();
  }
  ~CBoundary() override { moire_context_destroy(context_); }

  moire_context* context_ = nullptr;
};

TEST_F(CBoundary, EveryOpRefusesNullAndWrongSizes) {
  for (const Entry& entry : entries()) {
    const std::string op = entry.name + ": ";
    // A struct of zeros, with room for one from a later library.
    std::vector<size_t> args(entry.struct_size / sizeof(size_t) + 2);
    args[0] = entry.struct_size;
    const auto expect = [&](int32_t code, const std::string& text) {
      EXPECT_TRUE(fails(code, MOIRE_INVALID_ARGUMENT, text));
    };
    expect(entry.call(nullptr, args.data()), op + "context is null");
    expect(entry.call(context_, nullptr), op + "args is null");
    const std::string needs = ", must be set to sizeof(the struct), at most " +
                              std::to_string(entry.struct_size) + " in this library";
    for (const size_t wrong :
         {size_t{0}, size_t{4}, entry.struct_size - 4, entry.struct_size + sizeof(size_t),
          std::numeric_limits<size_t>::max()}) {
      args[0] = wrong;
      expect(entry.call(context_, args.data()),
             op + "struct_size is " + std::to_string(wrong) + needs);
    }
    if (!entry.workspace) continue;
    const std::string twin = entry.name + "_workspace: ";
    size_t bytes = 7;
    expect(entry.workspace(context_, args.data(), &bytes), twin + "struct_size is ");
    args[0] = entry.struct_size;
    expect(entry.workspace(nullptr, args.data(), &bytes), twin + "context is null");
    expect(entry.workspace(context_, nullptr, &bytes), twin + "args is null");
    expect(entry.workspace(context_, args.data(), nullptr), twin + "bytes is null");
    EXPECT_EQ(bytes, 7U);
  }
}

// Zeroed arguments say which operand is missing, or (no rows, no outputs) are nothing to do; they
// never crash.
TEST_F(CBoundary, EveryOpSurvivesZeroedArguments) {
  for (const Entry& entry : entries()) {
    std::vector<size_t> args(entry.struct_size / sizeof(size_t) + 1);
    args[0] = entry.struct_size;
    EXPECT_TRUE(
        fails(entry.call(context_, args.data()), MOIRE_INVALID_ARGUMENT, entry.name.substr(6)));
    // The shortest struct that there can be is all defaults as well.
    args[0] = sizeof(size_t);
    EXPECT_TRUE(
        fails(entry.call(context_, args.data()), MOIRE_INVALID_ARGUMENT, entry.name.substr(6)));
  }
}

// The sentence that says what is wrong may be what there is no memory for.
TEST_F(CBoundary, EveryOpSaysThatItRanOutOfMemory) {
  for (const Entry& entry : entries()) {
    std::vector<size_t> args(entry.struct_size / sizeof(size_t) + 1);
    args[0] = entry.struct_size;
    int32_t code = MOIRE_OK;
    int64_t n = 0;
    while (test::runs_out_of_memory(n, [&] { code = entry.call(context_, args.data()); })) {
      ASSERT_TRUE(fails(code, MOIRE_OUT_OF_MEMORY, "out of host memory"))
          << entry.name << ", " << n << " allocations";
      ++n;
    }
    EXPECT_GT(n, 0);
    EXPECT_TRUE(fails(code, MOIRE_INVALID_ARGUMENT, entry.name.substr(6)));
  }
}

// One token, two experts, k = 1.
struct RouterCall {
  RouterCall() {
    args.struct_size = sizeof(args);
    args.logits = {logits, MOIRE_FP32, 2, {1, 2}, 0};
    args.topk_idx = {idx, MOIRE_INT32, 2, {1, 1}, 0};
    args.topk_weights = {weights, MOIRE_FP32, 2, {1, 1}, 0};
    args.normalize = 1;
  }
  float logits[2] = {1, 2};
  int32_t idx[1] = {-1};
  float weights[1] = {-1};
  moire_router_args args{};
};

TEST_F(CBoundary, RunsAnOp) {
  RouterCall call;
  ASSERT_EQ(moire_router(context_, &call.args), MOIRE_OK) << moire_last_error();
  EXPECT_EQ(call.idx[0], 1);
  EXPECT_EQ(call.weights[0], 1.0F);
  EXPECT_STREQ(moire_last_error(), "");
}

TEST_F(CBoundary, AnOlderStructGetsDefaultsForWhatItLacks) {
  RouterCall call;
  call.args.struct_size = offsetof(moire_router_args, topk_weights);
  EXPECT_TRUE(fails(moire_router(context_, &call.args), MOIRE_INVALID_ARGUMENT,
                    "router: topk_weights is absent"));
  EXPECT_EQ(call.idx[0], -1);

  // Whatever lies behind the older struct is not read: `tail` is garbage, and stays zero rows.
  float x[2] = {3, 4}, rows[4] = {-1, -1, -1, -1};
  int32_t gather_idx[2] = {0, -1};
  int64_t offsets[2] = {0, 1};
  moire_permute_args permute{};
  permute.struct_size = offsetof(moire_permute_args, tail);
  permute.x = {x, MOIRE_FP32, 2, {1, 2}, 0};
  permute.gather_idx = {gather_idx, MOIRE_INT32, 1, {2}, 0};
  permute.rows = {rows, MOIRE_FP32, 2, {2, 2}, 0};
  permute.groups = {offsets, 1, 2};
  permute.tail = 77;
  ASSERT_EQ(moire_permute(context_, &permute), MOIRE_OK) << moire_last_error();
  EXPECT_EQ(rows[0], 3);
  EXPECT_EQ(rows[2], 0);
  permute.struct_size = sizeof(permute);
  EXPECT_TRUE(fails(moire_permute(context_, &permute), MOIRE_INVALID_ARGUMENT,
                    "permute: tail is 77, must be 0 to 1"));
}

TEST_F(CBoundary, TheMessageBelongsToItsThread) {
  EXPECT_TRUE(fails(moire_router(nullptr, nullptr), MOIRE_INVALID_ARGUMENT, "context is null"));
  std::string before, after;
  std::thread([&] {
    before = moire_last_error();
    EXPECT_TRUE(fails(moire_permute(context_, nullptr), MOIRE_INVALID_ARGUMENT, "args is null"));
    after = moire_last_error();
  }).join();
  EXPECT_EQ(before, "");
  EXPECT_EQ(after, "moire_permute: args is null");
  EXPECT_STREQ(moire_last_error(), "moire_router: context is null");
  RouterCall call;
  EXPECT_EQ(moire_router(context_, &call.args), MOIRE_OK);
  EXPECT_STREQ(moire_last_error(), "") << "a call that works clears it";
}

TEST_F(CBoundary, NamesItsCodes) {
  const std::pair<int32_t, const char*> names[] = {{MOIRE_OK, "ok"},
                                                   {MOIRE_INVALID_ARGUMENT, "invalid argument"},
                                                   {MOIRE_UNSUPPORTED, "unsupported"},
                                                   {MOIRE_OUT_OF_MEMORY, "out of memory"},
                                                   {MOIRE_DEVICE, "device"},
                                                   {MOIRE_IO, "io"},
                                                   {MOIRE_INTERNAL, "internal"},
                                                   {MOIRE_RANK_FAILED, "rank failed"},
                                                   {1234, "unknown code"}};
  for (const auto& [code, name] : names) EXPECT_STREQ(moire_code_name(code), name);
  EXPECT_EQ(moire_version_number(), MOIRE_VERSION_NUMBER);
  EXPECT_EQ(moire_build_info()[0], '{');
}

TEST_F(CBoundary, ContextsRefuseBadOptions) {
  moire_context* made = context_;
  EXPECT_TRUE(fails(moire_context_create(nullptr, &made), MOIRE_INVALID_ARGUMENT,
                    "moire_context_create: options is null"));
  EXPECT_EQ(made, nullptr);
  moire_context_options options{};
  EXPECT_TRUE(fails(moire_context_create(&options, &made), MOIRE_INVALID_ARGUMENT,
                    std::string("moire_context_create: struct_size is 0, must be set to ") +
                        "sizeof(the struct), at most " + std::to_string(sizeof(options)) +
                        " in this library"));
  options.struct_size = sizeof(options);
  EXPECT_TRUE(fails(moire_context_create(&options, nullptr), MOIRE_INVALID_ARGUMENT,
                    "moire_context_create: context is null"));
  options.device = 2;
  EXPECT_TRUE(fails(moire_context_create(&options, &made), MOIRE_INVALID_ARGUMENT,
                    "context: device kind 2, must be 0 (cpu) or 1 (cuda)"));
  options.device = MOIRE_CPU;
  options.num_threads = -1;
  EXPECT_TRUE(fails(moire_context_create(&options, &made), MOIRE_INVALID_ARGUMENT,
                    "context: num_threads is -1, must be 0 (all cores) to 4096"));
  options.num_threads = 0;
  options.index = 1;
  EXPECT_TRUE(fails(moire_context_create(&options, &made), MOIRE_INVALID_ARGUMENT,
                    "context: there is no cpu device 1: this machine has 1"));
  EXPECT_EQ(made, nullptr);
  moire_context_destroy(nullptr);
}

TEST_F(CBoundary, ContextsAreStrictOrNot) {
  moire_context_options options{};
  options.struct_size = sizeof(options);
  options.strict = 7;
  moire_context* made = context_;
  EXPECT_TRUE(fails(moire_context_create(&options, &made), MOIRE_INVALID_ARGUMENT,
                    "moire_context_create: strict is 7, must be 0 to 1"));
  EXPECT_EQ(made, nullptr);
}

TEST_F(CBoundary, ARankThatThereIsNotIsDescribedAndRefused) {
  for (const int32_t rank :
       {7, -1, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    RouterCall call;
    call.args.logits.rank = rank;
    EXPECT_TRUE(fails(moire_router(context_, &call.args), MOIRE_INVALID_ARGUMENT,
                      "router: logits has rank " + std::to_string(rank) + ", needs rank 2"));
    call = RouterCall();
    call.args.topk_weights.rank = rank;
    EXPECT_TRUE(fails(moire_router(context_, &call.args), MOIRE_INVALID_ARGUMENT,
                      "router: topk_weights is fp32 of rank " + std::to_string(rank) + ", needs"));
  }
}

TEST_F(CBoundary, ContextEntriesRefuseNull) {
  moire_context* made = nullptr;
  int32_t count = -1;
  EXPECT_TRUE(fails(moire_context_explaining(nullptr, &made), MOIRE_INVALID_ARGUMENT,
                    "moire_context_explaining: context or explaining is null"));
  EXPECT_TRUE(fails(moire_context_explaining(context_, nullptr), MOIRE_INVALID_ARGUMENT,
                    "moire_context_explaining: context or explaining is null"));
  EXPECT_TRUE(fails(moire_context_check(nullptr), MOIRE_INVALID_ARGUMENT,
                    "moire_context_check: context is null"));
  EXPECT_EQ(moire_context_check(context_), MOIRE_OK);
  EXPECT_TRUE(fails(moire_device_count(MOIRE_CPU, nullptr), MOIRE_INVALID_ARGUMENT,
                    "moire_device_count: count is null"));
  EXPECT_TRUE(fails(moire_device_count(9, &count), MOIRE_INVALID_ARGUMENT,
                    "moire_device_count: device is 9, must be 0 (cpu) or 1 (cuda)"));
  EXPECT_EQ(count, -1);
  EXPECT_EQ(moire_device_count(MOIRE_CPU, &count), MOIRE_OK);
  EXPECT_EQ(count, 1);
  EXPECT_TRUE(fails(moire_explanation(nullptr, nullptr, 0, nullptr), MOIRE_INVALID_ARGUMENT,
                    "moire_explanation: needs a context made by moire_context_explaining"));
  EXPECT_TRUE(fails(moire_explanation(context_, nullptr, 0, nullptr), MOIRE_INVALID_ARGUMENT,
                    "moire_explanation: needs a context made by moire_context_explaining"));
}

TEST_F(CBoundary, TextsSayHowLongTheyAreAndAreNeverCut) {
  moire_context* explaining = nullptr;
  ASSERT_EQ(moire_context_explaining(context_, &explaining), MOIRE_OK);
  RouterCall call;
  ASSERT_EQ(moire_router(explaining, &call.args), MOIRE_OK) << moire_last_error();
  EXPECT_EQ(call.idx[0], -1) << "an explaining context runs nothing";
  size_t needed = 0;
  ASSERT_EQ(moire_explanation(explaining, nullptr, 0, &needed), MOIRE_OK);
  std::string text(needed, '?');
  EXPECT_TRUE(fails(moire_explanation(explaining, text.data(), needed - 1, nullptr),
                    MOIRE_INVALID_ARGUMENT,
                    "moire_explanation: the buffer has " + std::to_string(needed - 1) +
                        " bytes, needs " + std::to_string(needed)));
  EXPECT_EQ(text, std::string(needed, '?'));
  ASSERT_EQ(moire_explanation(explaining, text.data(), needed, nullptr), MOIRE_OK);
  EXPECT_EQ(std::strlen(text.c_str()) + 1, needed);
  EXPECT_NE(text.find("\"router\""), std::string::npos) << text;
  EXPECT_TRUE(fails(moire_device_info(MOIRE_CPU, 0, nullptr, 0, nullptr), MOIRE_INVALID_ARGUMENT,
                    "moire_device_info: the buffer has 0 bytes, needs "));
  ASSERT_EQ(moire_device_info(MOIRE_CPU, 0, nullptr, 0, &needed), MOIRE_OK);
  EXPECT_GT(needed, 1U);
  moire_context_destroy(explaining);
}

}  // namespace
}  // namespace moire
