// A pool of threads that a CPU context owns. Work is a number of independent tasks, taken in order
// from one shared counter: which thread runs a task never changes what the task computes.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace moire {

class ThreadPool {
 public:
  // num_threads counts the calling thread; at least 1. Threads that the system refuses are done
  // without.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls fn(task, thread) for each task in [0, num_tasks), thread in [0, num_threads()); returns
  // when all are done. fn must not throw. Callers on several threads take turns. In a forked child,
  // which has no workers, the caller does all the work.
  template <class F>
  void parallel_for(int64_t num_tasks, F&& fn) {
    run(
        num_tasks, [](void* f, int64_t task, int thread) { (*static_cast<F*>(f))(task, thread); },
        const_cast<void*>(static_cast<const void*>(&fn)));
  }

 private:
  using Invoke = void (*)(void* function, int64_t task, int thread);

  void run(int64_t num_tasks, Invoke invoke, void* function);
  void work(int thread);
  void take_tasks(int thread);

  std::mutex callers_;
  std::vector<std::thread> workers_;
  pid_t owner_;
  // The job: written before generation_ is raised, read by workers after they saw it.
  Invoke invoke_ = nullptr;
  void* function_ = nullptr;
  int64_t num_tasks_ = 0;
  alignas(64) std::atomic<int64_t> next_task_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> busy_{0};
  std::atomic<bool> stop_{false};
};

// Cores this process may run on.
int available_cores();

}  // namespace moire
