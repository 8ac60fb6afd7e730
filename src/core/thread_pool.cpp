#include "core/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

#include "core/float_environment.h"

namespace moire {
namespace {

// Workers look this many times for the next job before they sleep: about 20 us, the time between
// two ops of one layer.
constexpr int kSpins = 2000;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until value differs from `old`, spinning first.
template <class T>
void wait_while_equal(const std::atomic<T>& value, T old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

ThreadPool::ThreadPool(int num_threads, Parallel lent)
    : lent_(lent),
      num_threads_(std::max(1, num_threads)),
      owner_(getpid()),
      workers_(std::make_unique<std::vector<std::thread>>()) {
  if (lent_ != nullptr) return;
  workers_->reserve(static_cast<size_t>(num_threads_ - 1));
  try {
    for (int i = 1; i < num_threads_; ++i) workers_->emplace_back([this, i] { work(i); });
  } catch (const std::system_error&) {
    // The process is at its thread limit: the threads that exist do the work, with the same
    // results.
    num_threads_ = static_cast<int>(workers_->size()) + 1;
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() == owner_) {
    stop();
  } else {
    // NOTE: a forked child has the handles without the threads. Those can be neither joined nor
    // detached (it throws), and destroyed only after either: they are left where they are.
    static_cast<void>(workers_.release());
  }
}

void ThreadPool::stop() {
  stop_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& worker : *workers_) worker.join();
}

void ThreadPool::run(int64_t num_tasks, Invoke invoke, void* function) {
  if (num_tasks <= 0) return;
  if (num_tasks == 1 || num_threads_ == 1 || getpid() != owner_) {
    for (int64_t task = 0; task < num_tasks; ++task) invoke(function, task, 0);
  } else {
    Job job{invoke, function, num_tasks, num_threads_};
    lent_ != nullptr ? run_lent(job) : run_own(job);
  }
}

void ThreadPool::run_lent(Job& job) {
  const auto body = [](void* argument) {
    const FloatEnvironment exact;
    Job& shared = *static_cast<Job*>(argument);
    const int thread = shared.next_thread.fetch_add(1, std::memory_order_relaxed);
    // Threads that nobody asked for have no scratch of their own: the others do the work.
    if (thread < shared.num_threads) shared.take_tasks(thread);
  };
  lent_(body, &job, static_cast<unsigned>(num_threads_), 0);
  // Each call of body goes on until no task is left, so that one is enough.
  if (job.next_thread.load(std::memory_order_relaxed) == 0) throw NoThreadsLent();
}

void ThreadPool::run_own(Job& job) {
  const std::lock_guard lock(callers_);
  job_ = &job;
  busy_.store(static_cast<int>(workers_->size()), std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  job.take_tasks(0);
  while (const int busy = busy_.load(std::memory_order_acquire)) wait_while_equal(busy_, busy);
}

void ThreadPool::Job::take_tasks(int thread) {
  for (;;) {
    const int64_t task = next_task.fetch_add(1, std::memory_order_relaxed);
    if (task >= num_tasks) return;
    invoke(function, task, thread);
  }
}

void ThreadPool::work(int thread) {
  const FloatEnvironment exact;
  uint32_t seen = 0;
  for (;;) {
    wait_while_equal(generation_, seen);
    ++seen;
    if (stop_.load(std::memory_order_relaxed)) return;
    job_->take_tasks(thread);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
  }
}

}  // namespace moire
