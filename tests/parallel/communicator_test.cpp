// Communicators: how they are made, given to contexts and left; through C as well.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/parallel/ranks.h"
#include "tests/support/expect.h"

namespace moire::test {
namespace {

constexpr const char* kAlone = "MOIRE_TEST_ALONE";  // set in a process that has one test

TEST(Communicator, HasARankASizeAndAWindowOfItsOwn) {
  const auto ranks = Communicator::threads(3, 1000).value();
  ASSERT_EQ(ranks.size(), 3U);
  for (int rank = 0; rank < 3; ++rank) {
    const Communicator& c = *ranks[static_cast<size_t>(rank)];
    EXPECT_EQ(c.rank(), rank);
    EXPECT_EQ(c.size(), 3);
    EXPECT_EQ(c.device(), Device::kCpu);
    EXPECT_EQ(c.window().bytes, 1000U);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(c.window().data) % 256, 0U);
    const std::vector<char> zeros(1000);
    EXPECT_EQ(std::memcmp(c.window().data, zeros.data(), 1000), 0);
    std::memset(c.window().data, rank + 1, 1000);
  }
  EXPECT_EQ(*static_cast<char*>(ranks[0]->window().data), 1);
}

TEST(Communicator, RefusesWhatThereIsNot) {
  EXPECT_TRUE(fails(Communicator::threads(0, 10).status(), Code::kInvalidArgument,
                    "communicator: num_ranks is 0, must be 1 to 1024"));
  EXPECT_TRUE(
      fails(Communicator::threads(1025, 10).status(), Code::kInvalidArgument, "num_ranks is 1025"));
  EXPECT_TRUE(fails(Communicator::threads(2, 10, -1).status(), Code::kInvalidArgument,
                    "timeout_ms is -1, must be 0 (ten minutes) to"));
  EXPECT_TRUE(fails(Communicator::threads(2, SIZE_MAX).status(), Code::kOutOfMemory,
                    "communicator: no memory for a window of"));
}

TEST(Communicator, OfCudaSaysWhatThereIsNot) {
  CommunicatorOptions options;
  options.device = MOIRE_CUDA;
  options.num_ranks = 2;
  const int devices = device_count(Device::kCuda);
  const int32_t indices[] = {0, devices};
  options.indices = indices;
  const Status status = Communicator::threads(options).status();
  EXPECT_NE(status.message().find("communicator: "), std::string::npos) << status.message();
  if (devices > 0) {
    EXPECT_TRUE(fails(status, Code::kInvalidArgument, "indices[1] is " + std::to_string(devices)));
    options.num_ranks = 33;
    options.indices = nullptr;
    EXPECT_TRUE(fails(Communicator::threads(options).status(), Code::kUnsupported,
                      "communicator: CUDA device 0 has 32 hardware queues, needs one for each"));
  }
  options.device = 2;
  EXPECT_TRUE(fails(Communicator::threads(options).status(), Code::kInvalidArgument,
                    "communicator: device is 2, must be 0 (cpu) or 1 (cuda)"));
}

TEST(Communicator, OfNcclSaysWhatThereIsNot) {
  CommunicatorOptions options;
  EXPECT_TRUE(fails(Communicator::nccl(options).status(), Code::kInvalidArgument,
                    "communicator: nccl_comm and nccl_id are null, needs one of them"));
  const char id[128] = {};
  options.nccl_id = id;
  EXPECT_TRUE(
      fails(Communicator::nccl(options).status(), Code::kInvalidArgument, "num_ranks is 0"));
  options.num_ranks = 2;
  options.rank = 2;
  EXPECT_TRUE(fails(Communicator::nccl(options).status(), Code::kInvalidArgument,
                    "communicator: rank is 2, must be 0 to 1"));
}

// The process has one that is too old already, which is asked before any other. It lies where the
// build put it beside this program, wherever both are now. Where another came first, a process of
// its own runs this test, into which nothing was preloaded.
TEST(Communicator, OfNcclNeedsAVersion) {
  const auto program = std::filesystem::read_symlink("/proc/self/exe");
  if (dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD) != nullptr && std::getenv(kAlone) == nullptr) {
    const std::string command = std::string("env -u LD_PRELOAD -u MOIRE_TEST_DEVICE ") + kAlone +
                                "=1 '" + program.string() +
                                "' --gtest_filter=Communicator.OfNcclNeedsAVersion 2>&1";
    const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
    ASSERT_NE(pipe, nullptr);
    std::string printed;
    for (int c = std::fgetc(pipe.get()); c != EOF; c = std::fgetc(pipe.get())) {
      printed += static_cast<char>(c);
    }
    EXPECT_NE(printed.find("[  PASSED  ] 1 test"), std::string::npos) << printed;
    return;
  }
  void* const old = dlopen((program.parent_path() / MOIRE_FAKE_NCCL).c_str(), RTLD_NOW);
  ASSERT_NE(old, nullptr) << dlerror();
  CommunicatorOptions options;
  const char id[128] = {};
  options.nccl_id = id;
  options.num_ranks = 1;
  const Status status = Communicator::nccl(options).status();
  const bool is_for_cpus = status.message().find("is for CPUs only") != std::string::npos;
  EXPECT_TRUE(fails(status, Code::kUnsupported,
                    is_for_cpus ? "communicator: asked for a CUDA device"
                                : "communicator: found NCCL 2.20.5, needs NCCL 2.29.2 or newer as "
                                  "libnccl.so.2"));
  dlclose(old);
}

TEST(Communicator, IsOfTheContextsDevice) {
  ContextOptions options;
  options.device = Device::kCuda;
  options.communicator = Communicator::threads(1, 0).value()[0];
  EXPECT_TRUE(fails(Context::create(options).status(), Code::kInvalidArgument,
                    "context: its communicator is of cpu device 0 but the device is cuda 0"));
}

// A context keeps the memory; what is gone is the rank.
TEST(Communicator, MayBeDestroyedBeforeItsContexts) {
  Random random;
  RoutingOptions routing;
  routing.tokens = {3, 3};
  Routed routed(routing, random);
  routed.ranks.communicator(0)->leave();  // as its destruction in C
  EXPECT_TRUE(fails(test::dispatch(routed.ranks.tested(1), routed.dispatch(1)), Code::kRankFailed,
                    "dispatch: rank 0 has left"));
}

// One context per rank, from C.
class InC : public testing::Test {
 protected:
  void SetUp() override {
    moire_communicator_options options = {};
    options.struct_size = sizeof(options);
    options.num_ranks = 2;
    options.window_bytes = 4096;
    ASSERT_EQ(moire_communicator_threads(&options, communicators_), MOIRE_OK) << moire_last_error();
    for (int rank = 0; rank < 2; ++rank) {
      moire_context_options with = {};
      with.struct_size = sizeof(with);
      with.num_threads = 1;
      with.communicator = communicators_[rank];
      ASSERT_EQ(moire_context_create(&with, &contexts_[rank]), MOIRE_OK) << moire_last_error();
    }
  }
  void TearDown() override {
    for (int rank = 0; rank < 2; ++rank) {
      moire_context_destroy(contexts_[rank]);
      moire_communicator_destroy(communicators_[rank]);
    }
    moire_communicator_destroy(nullptr);
  }
  // x_t = 10 * rank + t, one column; token t of two goes to rank t, with its row at the start of
  // the window.
  int32_t dispatch(int rank, float* x) {
    int32_t places[4] = {0, -1, -1, 0};
    moire_dispatch_args args = {};
    args.struct_size = sizeof(args);
    for (int t = 0; t < 2; ++t) x[t] = static_cast<float>(10 * rank + t);
    args.x = TensorView(x, DType::kFP32, {2, 1});
    args.places = TensorView(places, DType::kInt32, {2, 2});
    args.overflow = MOIRE_OVERFLOW_DROP;
    void* window = nullptr;
    size_t bytes = 0;
    EXPECT_EQ(moire_communicator_window(communicators_[rank], &window, &bytes), MOIRE_OK);
    EXPECT_EQ(bytes, 4096U);
    args.x_recv = TensorView(window, DType::kFP32, {4, 1});
    const int32_t code = moire_dispatch(contexts_[rank], &args);
    if (code == MOIRE_OK) std::memcpy(received_[rank], window, sizeof(received_[rank]));
    return code;
  }

  moire_communicator* communicators_[2] = {};
  moire_context* contexts_[2] = {};
  float received_[2][4] = {};
};

TEST_F(InC, RanksExchangeRows) {
  float x[2][2];
  std::thread other([&] { EXPECT_EQ(dispatch(1, x[1]), MOIRE_OK) << moire_last_error(); });
  EXPECT_EQ(dispatch(0, x[0]), MOIRE_OK) << moire_last_error();
  other.join();
  // Token `rank` of each, two rows for either.
  EXPECT_EQ(received_[0][0], 0);
  EXPECT_EQ(received_[0][2], 10);
  EXPECT_EQ(received_[1][0], 1);
  EXPECT_EQ(received_[1][2], 11);
}

TEST_F(InC, ARankThatIsDestroyedHasLeft) {
  moire_communicator_destroy(communicators_[1]);
  communicators_[1] = nullptr;
  float x[2];
  EXPECT_EQ(dispatch(0, x), MOIRE_RANK_FAILED);
  EXPECT_STREQ(moire_last_error(),
               "dispatch: rank 1 has left; calls of these ranks fail from now on");
}

TEST_F(InC, EntriesRefuseNulls) {
  moire_communicator* two[2];
  EXPECT_EQ(moire_communicator_threads(nullptr, two), MOIRE_INVALID_ARGUMENT);
  moire_communicator_options options = {};
  options.struct_size = sizeof(options);
  options.num_ranks = 2;
  EXPECT_EQ(moire_communicator_threads(&options, nullptr), MOIRE_INVALID_ARGUMENT);
  EXPECT_STREQ(moire_last_error(), "moire_communicator_threads: communicators is null");
  EXPECT_EQ(moire_communicator_window(communicators_[0], nullptr, nullptr), MOIRE_INVALID_ARGUMENT);
  EXPECT_STREQ(moire_last_error(),
               "moire_communicator_window: communicator, data or bytes is null");
  EXPECT_EQ(moire_communicator_rank(communicators_[0], nullptr, nullptr, nullptr),
            MOIRE_INVALID_ARGUMENT);
  EXPECT_STREQ(moire_last_error(),
               "moire_communicator_rank: communicator, rank, num_ranks or index is null");
}

TEST_F(InC, ARankSaysWhichOfHowManyItIs) {
  for (int rank = 0; rank < 2; ++rank) {
    int32_t found = 7, num_ranks = 7, index = 7;
    EXPECT_EQ(moire_communicator_rank(communicators_[rank], &found, &num_ranks, &index), MOIRE_OK);
    EXPECT_EQ(found, rank);
    EXPECT_EQ(num_ranks, 2);
    EXPECT_EQ(index, -1);  // the CPU
  }
}

}  // namespace
}  // namespace moire::test
