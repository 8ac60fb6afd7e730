// Ranks: communicators whose ranks are threads, windows that are divided alike on every rank, with
// guards, and the tokens of each.
#pragma once

#include <gtest/gtest.h>
#include <moire/buffer.h>
#include <moire/expert_parallel.h>

#include <functional>
#include <memory>
#include <vector>

#include "tests/support/tensors.h"
#include "tests/support/tested.h"

namespace moire::test {

class Ranks {
 public:
  static constexpr size_t kBytes = 1 << 20, kGuard = 512;  // of a window, behind its tensors

  // On CUDA they are spread over the devices.
  static std::vector<std::shared_ptr<Communicator>> threads(int size, int64_t timeout_ms,
                                                            Device device,
                                                            int num_multiprocessors = 0);
  // Contexts with as many threads each; 0: all share those of one context. On CUDA each has a
  // stream.
  Ranks(const std::vector<std::shared_ptr<Communicator>>& communicators, int num_threads);

  int size() const { return static_cast<int>(communicators_.size()); }
  std::shared_ptr<Communicator>& communicator(int rank) { return communicators_.at(at(rank)); }
  Context context(int rank) const { return contexts_.at(at(rank)); }
  Tested tested(int rank) const;

  // A tensor at the same place of every window, poisoned; `padding` elements between its rows.
  size_t take(DType dtype, int64_t rows, int64_t columns, int64_t padding = 0);
  TensorView in(int rank, size_t tensor) const;
  // All 0xFF again.
  void poison();
  // Whether bytes of the windows that belong to no tensor still hold what they held at first.
  bool are_undamaged() const;

  // Where calls of a rank find their memory, on CUDA.
  staging::StagedCall& staged(int rank) const { return *staged_.at(at(rank)); }
  // Windows on a device get what in() shows, and the other way round; nothing else is under way.
  void upload() const;
  void download() const;

  // One call of every rank, each on its thread; the statuses by rank.
  using Call = std::function<Status(int rank, const Tested& context)>;
  std::vector<Status> run(const Call& call) const;
  // That all succeed.
  void succeed(const Call& call) const;

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }
  // The window, or its copy on the host.
  std::byte* window(int rank) const;

  std::vector<std::shared_ptr<Communicator>> communicators_;
  std::vector<Context> contexts_;
  std::vector<Buffer> copies_;  // of windows on a device
  std::vector<std::unique_ptr<staging::StagedCall>> staged_;
  std::vector<TensorView> taken_;  // data: the offset
  size_t used_ = kGuard;
};

// Of a contiguous tensor, whatever they mean.
void random_bytes(TestTensor& t, Random& random);

struct RoutingOptions {
  std::vector<int64_t> tokens;  // of each rank
  int64_t k = 2, local_experts = 4, hidden = 40;
  int64_t capacity = 0;  // 0: the most tokens of a rank
  DType dtype = DType::kFP32, index_type = DType::kInt64;
  int64_t padding = 0;
  bool drops = false;  // some choices are -1 or E
  Device device = tested_device();
  std::vector<std::shared_ptr<Communicator>> communicators = {};  // empty: threads
  bool one_each = false;  // at most one choice at a rank, rank by rank

  int ranks() const { return static_cast<int>(tokens.size()); }
  int64_t num_experts() const { return ranks() * local_experts; }
  int64_t room() const;
};

// The tokens of one rank and where they go: planned by dispatch_plan.
struct Tokens {
  Tokens(const RoutingOptions& options, int rank, Random& random);
  Status plan(const Tested& context, int64_t capacity);

  TestTensor x, topk_idx, topk_weights, places, counts;
  int64_t num_experts;
};

// All ranks, what they send and what they receive.
struct Routed {
  Routed(const RoutingOptions& options, Random& random, int64_t timeout_ms = 20'000,
         int num_threads = 1);

  const Tokens& of(int rank) const { return *tokens[static_cast<size_t>(rank)]; }
  // Views of the rank's tensors.
  DispatchArgs dispatch(int rank) const;
  // Of y's rows and the weights as they came.
  CombineArgs combine(int rank, const TestTensor& y, const TestTensor& topk_weights) const;
  // Row of the receiver that has token t of `rank`; -1: it was not sent there.
  int64_t row(int rank, int64_t t, int receiver) const;

  RoutingOptions options;
  Ranks ranks;
  std::vector<std::unique_ptr<Tokens>> tokens;
  size_t x_recv, topk_idx_recv, topk_weights_recv;
};

}  // namespace moire::test
