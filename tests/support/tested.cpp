#include "tests/support/tested.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "tests/support/expect.h"

namespace moire::test {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool is_cuda() { return environment("MOIRE_TEST_DEVICE") == "cuda"; }

const Result<Context>& cuda() {
  static const Result<Context> context = [] {
    ContextOptions options;
    options.device = Device::kCuda;
    options.implementation = environment("MOIRE_TEST_IMPLEMENTATION");
    return Context::create(options);
  }();
  return context;
}

constexpr int kSkipped = 77;  // SKIP_RETURN_CODE in tests/CMakeLists.txt

// Of the test that runs now.
struct Counts {
  int ran = 0, refused = 0;
  std::string reason;  // of the first that was refused
};
Counts& counts() {
  static Counts counts;
  return counts;
}

// Says of each test what the device did, and skips those of which it did nothing.
class Report : public testing::EmptyTestEventListener {
  void OnTestProgramStart(const testing::UnitTest&) override {
    if (!is_cuda() || cuda().ok()) return;
    std::printf("skipped: %s\n", cuda().status().message().c_str());
    std::exit(kSkipped);
  }
  void OnTestStart(const testing::TestInfo&) override { counts() = {}; }
  // Listeners hear of ends in reverse order: this one before the printer.
  void OnTestEnd(const testing::TestInfo& test) override {
    if (!is_cuda() || test.result()->Skipped()) return;
    if (counts().ran == 0) {
      skip();
    } else if (counts().refused > 0) {
      std::printf("[  PARTLY  ] %d calls on the GPU, %d on the CPU: %s\n", counts().ran,
                  counts().refused, counts().reason.c_str());
    }
  }
  static void skip() {
    GTEST_SKIP() << (counts().reason.empty() ? "judges the CPU alone" : counts().reason);
  }
};

const bool is_reporting = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Report);
  return true;
}();

}  // namespace

staging::StagedCall& Tested::staged_call() {
  static staging::StagedCall call;
  return call;
}

bool Tested::note(const Status& status) {
  static std::mutex mutex;  // ranks are threads
  const std::lock_guard lock(mutex);
  if (status.code() != Code::kUnsupported) {
    ++counts().ran;
    return true;
  }
  ++counts().refused;
  if (counts().reason.empty()) counts().reason = status.message();
  return false;
}

Device tested_device() { return is_cuda() ? Device::kCuda : Device::kCpu; }
Tested tested(int num_threads) { return is_cuda() ? cuda().value() : cpu(num_threads); }

}  // namespace moire::test
