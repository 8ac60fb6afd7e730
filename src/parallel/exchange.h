// Exchange: one call of all ranks together. Every rank is in it from the return of its begin() to
// its end(); there they may touch each other's windows, and only there. Both are meetings: a rank
// tells every other what it calls, and goes on once all have told it the same.
#pragma once

#include <moire/context.h>
#include <moire/expert_parallel.h>

#include <string_view>

#include "core/argument_check.h"
#include "parallel/peers.h"

namespace moire {

// A call as this rank makes it; `peers` are null where it is alone.
Proposal proposal_of(const Peers* peers, const DispatchArgs& args);
Proposal proposal_of(const Peers* peers, const CombineArgs& args);

class Exchange {
 public:
  template <class A>
  Exchange(const Context& context, const A& args)
      : peers_(peers_of(context)), proposal_(proposal_of(peers_, args)) {}
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
  Mailbox::Post& post(int of, int from) const {
    return peers_->mailbox(of, from).posts[epoch_ % 2];
  }
  bool has_come(int other) const;
  Status meet(const Excess& excess);
  void tell_all(const Excess& excess) const;
  Status wait_for(int other, Clock::time_point deadline) const;
  Status check_gone(bool has_told) const;
  Status ended(Ending ending, int64_t other, int64_t detail = 0) const;

  const Peers* peers_;  // null: alone
  Proposal proposal_;
  int64_t epoch_ = 0;
  bool is_entered_ = false, is_between_ = false;
};

// That a tensor which others touch lies in the window of the context's rank, where there are
// others.
void check_window(ArgumentCheck& check, std::string_view name, const TensorView& t);

}  // namespace moire
