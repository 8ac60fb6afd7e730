// Every task runs exactly once, whatever the number of threads, callers, or processes.
#include "core/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "core/float_environment.h"
#include "tests/support/allocations.h"

namespace moire {
namespace {

TEST(ThreadPool, RunsEachTaskOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (const int64_t tasks : {0, 1, 2, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
      std::atomic<bool> thread_in_range = true;
      pool.parallel_for(tasks, [&](int64_t task, int thread) {
        ++runs[static_cast<size_t>(task)];
        if (thread < 0 || thread >= threads) thread_in_range = false;
      });
      for (const auto& count : runs) ASSERT_EQ(count, 1);
      EXPECT_TRUE(thread_in_range);
    }
  }
}

TEST(ThreadPool, ServesCallersOnSeveralThreads) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 200; ++repeat) {
        pool.parallel_for(10, [&](int64_t task, int) { sum += task; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 200 * 45);
}

TEST(ThreadPool, WorksInAForkedChildWithoutItsThreads) {
  ThreadPool pool(4);
  std::atomic<int> warm = 0;
  pool.parallel_for(100, [&](int64_t, int) { ++warm; });
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a hang ends as a failure
    std::atomic<int> runs = 0;
    pool.parallel_for(100, [&](int64_t, int) { ++runs; });
    _exit(runs == 100 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

TEST(ThreadPool, IsDestroyedInAForkedChildWithoutItsThreads) {
  auto pool = std::make_unique<ThreadPool>(4);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    pool.reset();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  std::atomic<int> runs = 0;
  pool->parallel_for(100, [&](int64_t, int) { ++runs; });
  EXPECT_EQ(runs, 100) << "the parent keeps its threads";
}

TEST(ThreadPool, EndsTheThreadsThatItStartedWhereThereIsNoMemoryForMore) {
  const auto start = [] {
    try {
      const ThreadPool pool(5);
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  };
  int64_t n = 0;
  bool starts = false;
  while (test::runs_out_of_memory(n, [&] { starts = start(); })) {
    EXPECT_FALSE(starts) << n << " allocations";
    ++n;
  }
  EXPECT_TRUE(starts);
  EXPECT_GT(n, 4);
}

// Lends new threads, one fewer than asked for: as an OpenMP run-time may.
void lend_threads(void (*body)(void*), void* argument, unsigned num_threads, unsigned) {
  std::vector<std::thread> threads;
  for (unsigned i = 1; i + 1 < num_threads; ++i) threads.emplace_back(body, argument);
  body(argument);
  for (std::thread& thread : threads) thread.join();
}

TEST(ThreadPool, RunsOnLentThreads) {
  ThreadPool pool(4, lend_threads);
  EXPECT_EQ(pool.num_threads(), 4);
  std::vector<std::atomic<int>> runs(1000);
  std::atomic<bool> thread_in_range = true, flushed = false;
  volatile float tiny = 1e-30F, scale = 1e-10F;
  pool.parallel_for(1000, [&](int64_t task, int thread) {
    ++runs[static_cast<size_t>(task)];
    if (thread < 0 || thread >= 3) thread_in_range = false;
    if (tiny * scale == 0) flushed = true;
  });
  for (const auto& count : runs) ASSERT_EQ(count, 1);
  EXPECT_TRUE(thread_in_range);
  EXPECT_FALSE(flushed);
}

TEST(ThreadPool, LeavesThreadsIdleThatItDidNotAskFor) {
  ThreadPool pool(2, [](void (*body)(void*), void* argument, unsigned num_threads, unsigned) {
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < num_threads + 4; ++i) threads.emplace_back(body, argument);
    for (std::thread& thread : threads) thread.join();
  });
  std::vector<std::atomic<int>> runs(64);
  std::atomic<bool> thread_in_range = true;
  pool.parallel_for(64, [&](int64_t task, int thread) {
    ++runs[static_cast<size_t>(task)];
    if (thread < 0 || thread >= 2) thread_in_range = false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // so that all of them are at work
  });
  for (const auto& count : runs) ASSERT_EQ(count, 1);
  EXPECT_TRUE(thread_in_range);
}

TEST(ThreadPool, SaysThatNoThreadWasLent) {
  ThreadPool pool(4, [](void (*)(void*), void*, unsigned, unsigned) {});
  std::atomic<int> runs = 0;
  EXPECT_THROW(pool.parallel_for(10, [&](int64_t, int) { ++runs; }), NoThreadsLent);
  EXPECT_EQ(runs, 0);
  pool.parallel_for(1, [&](int64_t, int) { ++runs; });
  EXPECT_EQ(runs, 1) << "one task is the caller's";
}

TEST(FloatEnvironment, KeepsSubnormalsWhereTheCallerFlushesThem) {
#if defined(__x86_64__)
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // flush to zero, denormals are zero
  volatile float tiny = 1e-30F, scale = 1e-10F, result = 0;
  {
    const FloatEnvironment exact;
    result = tiny * scale;
    EXPECT_GT(result, 0);
  }
  EXPECT_EQ(_mm_getcsr() & 0x8040, 0x8040U) << "the caller's mode comes back";
  result = tiny * scale;
  EXPECT_EQ(result, 0);
  _mm_setcsr(before);

  ThreadPool pool(2);
  std::atomic<int> flushed = 0;
  pool.parallel_for(64, [&](int64_t, int thread) {
    volatile float product = tiny * scale;
    if (thread != 0 && product == 0) ++flushed;
  });
  EXPECT_EQ(flushed, 0);
#else
  GTEST_SKIP() << "x86 only";
#endif
}

}  // namespace
}  // namespace moire
