// What is asked for once: by one thread, by several, and more of it later.
#include "backend/cuda/runtime/grants.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace moire::cuda {
namespace {

// How often a grant is asked for.
int times_given(Grants& grants, const void* address, size_t amount) {
  int times = 0;
  grants.need(address, amount, [&] {
    ++times;
    return true;
  });
  return times;
}

TEST(Grants, AreGivenOncePerAddress) {
  const std::vector<char> memory(64);
  Grants grants;
  for (const char& c : memory) EXPECT_EQ(times_given(grants, &c, 100), 1);
  for (const char& c : memory) EXPECT_EQ(times_given(grants, &c, 100), 0);
}

TEST(Grants, AreGivenAgainForMoreOnly) {
  const char kernel = 0;
  Grants grants;
  EXPECT_EQ(times_given(grants, &kernel, 50), 1);
  EXPECT_EQ(times_given(grants, &kernel, 60), 1);
  EXPECT_EQ(times_given(grants, &kernel, 60), 0);
  EXPECT_EQ(times_given(grants, &kernel, 50), 0);
}

TEST(Grants, ThatFailedAreAskedForAgain) {
  const char kernel = 0;
  Grants grants;
  grants.need(&kernel, 50, [] { return false; });
  EXPECT_EQ(times_given(grants, &kernel, 50), 1);
}

TEST(Grants, AreStillGivenOnceTheTableIsFull) {
  const std::vector<char> memory(Grants::kMost + 1);
  Grants grants;
  for (const char& c : memory) EXPECT_EQ(times_given(grants, &c, 1), 1);
  EXPECT_EQ(times_given(grants, &memory[0], 1), 0);
  EXPECT_EQ(times_given(grants, &memory.back(), 1), 1);
}

TEST(Grants, OfSeveralThreadsAreGivenOnce) {
  const std::vector<char> memory(300);
  Grants grants;
  std::atomic<int> times{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (const char& c : memory) times += times_given(grants, &c, 7);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(times, 300);
}

}  // namespace
}  // namespace moire::cuda
