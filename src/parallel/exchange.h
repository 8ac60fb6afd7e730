// Exchange: one call of all ranks together. Every rank is in it from the return of its begin() to
// its end(); there they may touch each other's windows, and only there. Both are meetings: a rank
// tells every other what it calls, and goes on once all have told it the same.
#pragma once

#include <moire/context.h>
#include <moire/expert_parallel.h>

#include <initializer_list>
#include <string_view>

#include "core/argument_check.h"
#include "parallel/peers.h"

namespace moire {

// What ranks call together; its name and the tensors that lie in windows.
struct Collective {
  int64_t number;
  std::string_view name;
  std::string_view tensors[Proposal::kMostTensors];
};

class Exchange {
 public:
  Exchange(const Context& context, const DispatchArgs& args);
  Exchange(const Context& context, const CombineArgs& args);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // All ranks return the same: whether the call goes on. Not where it does not because of a rank's
  // `excess`, or because ranks differ.
  Status begin(const Excess& excess = {});
  Status end();

  int rank() const { return peers_ == nullptr ? 0 : peers_->rank; }
  int size() const { return peers_ == nullptr ? 1 : peers_->size(); }
  // Where a tensor of this rank's window begins in that of another.
  void* at(int other, const TensorView& own) const {
    if (peers_ == nullptr || own.data == nullptr) return own.data;
    return peers_->window(other) + (static_cast<std::byte*>(own.data) - peers_->window(rank()));
  }

 private:
  using Clock = std::chrono::steady_clock;
  // Tensors in the order of collective.tensors.
  Exchange(const Context& context, const Collective& collective,
           std::initializer_list<TensorView> in_window, int64_t num_experts, int64_t overflow = 0);
  Mailbox::Post& post(int of, int from) const {
    return peers_->mailbox(of, from).posts[epoch_ % 2];
  }
  bool has_come(int other) const;
  Status meet(const Excess& excess);
  void tell_all(const Excess& excess) const;
  Status wait_for(int other, Clock::time_point deadline) const;
  Status check_gone(bool has_told) const;
  Status compare(int other) const;
  Status refuse(int whose, const Excess& excess) const;
  Status failed(std::string_view what) const;

  const Collective& collective_;
  const Peers* peers_;  // null: alone
  Proposal proposal_{};
  int64_t epoch_ = 0;
  bool is_entered_ = false, is_between_ = false;
};

// That a tensor which others touch lies in the window of the context's rank, where there are
// others.
void check_window(ArgumentCheck& check, std::string_view name, const TensorView& t);

}  // namespace moire
