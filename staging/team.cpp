#include "staging/team.h"

#include <barrier>
#include <thread>
#include <vector>

namespace moire::staging {

struct Team::State {
  explicit State(int num_threads) : start(num_threads), finish(num_threads) {}
  std::barrier<> start, finish;
  std::function<void(int)> work;  // empty: the team is over
  std::vector<std::thread> threads;
};

Team::Team(int num_threads)
    : num_threads_(num_threads), state_(std::make_unique<State>(num_threads)) {
  for (int i = 1; i < num_threads; ++i) {
    state_->threads.emplace_back([state = state_.get(), i] {
      for (;;) {
        state->start.arrive_and_wait();
        if (!state->work) return;
        state->work(i);
        state->finish.arrive_and_wait();
      }
    });
  }
}

Team::~Team() {
  state_->work = nullptr;
  state_->start.arrive_and_wait();
  for (std::thread& thread : state_->threads) thread.join();
}

void Team::run(const std::function<void(int)>& work) {
  state_->work = work;
  state_->start.arrive_and_wait();
  work(0);
  state_->finish.arrive_and_wait();
}

}  // namespace moire::staging
