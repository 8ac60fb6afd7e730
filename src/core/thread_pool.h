// The threads of a CPU context: a pool of its own, or threads that the caller lends. Work is a
// number of independent tasks, taken in order from one shared counter: which thread runs a task
// never changes what the task computes.
#pragma once

#include <moire.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moire {

// Thrown by parallel_for where lent threads did not come: the caller's function returned without
// having called its body, so that nothing of the job was done.
class NoThreadsLent : public std::exception {};

class ThreadPool {
 public:
  using Parallel = decltype(moire_context_options::parallel);  // lends threads

  // num_threads counts the calling thread; at least 1. Threads that the system refuses are done
  // without; std::bad_alloc where there is no memory to start them. With `lent` the pool has no
  // threads of its own.
  explicit ThreadPool(int num_threads, Parallel lent = nullptr);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls fn(task, thread) for each task in [0, num_tasks), thread in [0, num_threads()); returns
  // when all are done. fn must not throw. Callers on several threads take turns, unless each is
  // lent its own (or none: NoThreadsLent). In a forked child, which has no workers, the caller does
  // all the work.
  template <class F>
  void parallel_for(int64_t num_tasks, F&& fn) {
    run(
        num_tasks, [](void* f, int64_t task, int thread) { (*static_cast<F*>(f))(task, thread); },
        const_cast<void*>(static_cast<const void*>(&fn)));
  }

 private:
  using Invoke = void (*)(void* function, int64_t task, int thread);

  struct Job {
    Invoke invoke;
    void* function;
    int64_t num_tasks;
    int num_threads;  // asked for, of lent threads
    alignas(64) std::atomic<int64_t> next_task{0};
    alignas(64) std::atomic<int> next_thread{0};  // of lent threads

    void take_tasks(int thread);
  };

  void run(int64_t num_tasks, Invoke invoke, void* function);
  void run_lent(Job& job);
  void run_own(Job& job);
  void work(int thread);
  void stop();

  const Parallel lent_;
  int num_threads_;
  pid_t owner_;
  std::mutex callers_;
  std::unique_ptr<std::vector<std::thread>> workers_;
  Job* job_ = nullptr;  // written before generation_ is raised, read by workers after they saw it
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> busy_{0};
  std::atomic<bool> stop_{false};
};

// Cores this process may run on.
int available_cores();

}  // namespace moire
