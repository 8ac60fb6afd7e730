// Threads that run one function together: those of a benchmark's copies, and ranks.
#pragma once

#include <functional>
#include <memory>

namespace moire::staging {

class Team {
 public:
  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // work(thread) on every thread, the caller being thread 0.
  void run(const std::function<void(int)>& work);
  int num_threads() const { return num_threads_; }

 private:
  struct State;
  int num_threads_;
  std::unique_ptr<State> state_;
};

}  // namespace moire::staging
