// Ranks that are threads of this process: windows that are divided alike on all, with bytes between
// their tensors that are nobody's, and calls of all at once. On CUDA they are spread over the
// devices, on which windows and calls are staged.
#pragma once

#include <moire/expert_parallel.h>

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "staging/entry.h"
#include "staging/staged_call.h"

namespace moire::staging {

class Ranks {
 public:
  explicit Ranks(int size) : size_(size) {}

  // The number of a tensor that all windows have at one place; before open().
  size_t take(DType dtype, int64_t rows, int64_t columns);
  // Makes the windows, on the host, every byte of which is 0xFF.
  Status open();
  bool is_open() const { return !communicators_.empty(); }
  int64_t window_bytes() const { return window_bytes_; }
  std::span<std::byte> window(size_t rank) const;
  std::vector<std::span<std::byte>> windows() const;
  // Without data before open().
  TensorView in(size_t rank, size_t tensor) const;

  // The op with the arguments of each rank, all at once, each a thread with a context made like
  // the first call's. What all say; that they differ is an error.
  template <class A>
  Status run(const Context& context, const std::vector<A>& args) {
    if (Status status = make_contexts(context); !status.ok()) return status;
    std::vector<A> there = args;
    for (size_t rank = 0; rank < staged_.size(); ++rank) {  // before any of them waits for others
      staged_[rank].clear();
      staged_[rank].add(args[rank]);
      if (Status status = staged_[rank].upload(); !status.ok()) return status;
      there[rank] = staged_[rank].on_device(args[rank]);
    }
    return run_staged(
        [&](size_t rank, const Context& of_rank) { return Entry<A>::kRun(of_rank, there[rank]); });
  }

 private:
  static constexpr int64_t kGuard = 256;  // bytes around each tensor
  using Call = std::function<Status(size_t rank, const Context& context)>;
  using Communicators = std::vector<std::shared_ptr<Communicator>>;

  Status make_contexts(const Context& like);
  Status open_on_devices();
  Status run_staged(const Call& call);
  Status run_all(const Call& call);

  int size_;
  std::vector<TensorView> tensors_;
  std::vector<int64_t> offsets_;
  int64_t window_bytes_ = kGuard;
  Communicators communicators_;    // whose windows the host has
  Communicators on_device_;        // of CUDA
  std::deque<StagedCall> staged_;  // of each rank there
  std::vector<Context> contexts_;
};

}  // namespace moire::staging
