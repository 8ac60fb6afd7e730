#include "tests/support/random.h"

#include <cstdlib>
#include <functional>
#include <string>

namespace moire::test {
namespace {

uint64_t seed_of_this_run() {
  static const uint64_t seed = [] {
    const char* given = std::getenv("MOIRE_TEST_SEED");
    return given != nullptr ? std::strtoull(given, nullptr, 10) : uint64_t{std::random_device{}()};
  }();
  return seed;
}

uint64_t seed_of_this_test() {
  const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string name =
      test == nullptr ? "" : std::string(test->test_suite_name()) + "." + test->name();
  return seed_of_this_run() ^ std::hash<std::string>{}(name);
}

}  // namespace

Random::Random()
    : engine_(seed_of_this_test()),
      trace_("random inputs", 0,
             "repeat with MOIRE_TEST_SEED=" + std::to_string(seed_of_this_run())) {}

}  // namespace moire::test
