#include "parallel/exchange.h"

#include <moire/roles.h>

#include <atomic>
#include <cstring>
#include <initializer_list>
#include <string>
#include <thread>

#include "core/status_macros.h"

namespace moire {
namespace {

// Ranks that compute reach a meeting within microseconds of each other; with more of them than
// cores, or with one that is late, the waiting should cost nothing.
constexpr int kYields = 200;
constexpr auto kShortest = std::chrono::microseconds(20), kLongest = std::chrono::microseconds(500);

// What ranks call together: its name, and the tensors that lie in windows.
struct Collective {
  int64_t op;
  std::string_view name;
  std::string_view tensors[Proposal::kMostTensors];
};
constexpr Collective kDispatchCall = {
    1, "dispatch", {"x_recv", "x_scales_recv", "topk_idx_recv", "topk_weights_recv"}};
constexpr Collective kCombineCall = {2, "combine", {"rows", "topk_weights_recv", "", ""}};

const Collective& collective_of(const Proposal& proposal) {
  return proposal.op == kDispatchCall.op ? kDispatchCall : kCombineCall;
}

// Tensors in the order of collective.tensors; rows alone have no experts.
Proposal proposal_of(const Peers* peers, const Collective& collective,
                     std::initializer_list<TensorView> in_window, const auto& args) {
  Proposal proposal{};
  proposal.op = collective.op;
  proposal.num_experts = is_present(args.topk_idx) ? args.num_experts : 0;
  auto* said = proposal.tensors;
  for (const TensorView& t : in_window) {
    if (t.rank == 2) {
      said->tensor = {nullptr, t.dtype, t.rank, {t.shape[0], t.shape[1], 0}, t.stride()};
    }
    if (peers != nullptr && t.num_elements() != 0) {
      said->offset = static_cast<std::byte*>(t.data) - peers->window(peers->rank);
    }
    ++said;
  }
  return proposal;
}

// The first thing in which another rank's call differs from that of this one.
std::string difference(const EndedCall& call) {
  const Proposal &own = call.proposal, &theirs = call.theirs;
  const Collective& collective = collective_of(own);
  const auto other = call.other;
  if (theirs.op != own.op) {
    return concat("rank ", other, " calls ", collective_of(theirs).name, ", rank ", call.rank, " ",
                  collective.name);
  }
  for (int i = 0; i < Proposal::kMostTensors; ++i) {
    const auto &a = theirs.tensors[i], &b = own.tensors[i];
    if (std::memcmp(&a, &b, sizeof(a)) == 0) continue;
    return concat(collective.tensors[i], " is ", a.tensor, " at byte ", a.offset,
                  " of the window of rank ", other, " but ", b.tensor, " at byte ", b.offset,
                  " of that of rank ", call.rank);
  }
  const bool in_experts = theirs.num_experts != own.num_experts;
  return concat(in_experts ? "num_experts is " : "overflow is ",
                in_experts ? theirs.num_experts : theirs.overflow, " on rank ", other, " but ",
                in_experts ? own.num_experts : own.overflow, " on rank ", call.rank);
}

std::string reason_of(const EndedCall& call) {
  switch (call.ending) {
    case Ending::kBusy:
      return concat("rank ", call.rank,
                    " is in a call already, on another thread or stream; a communicator takes one "
                    "at a time");
    case Ending::kLeft:
      return concat("rank ", call.other, " has left");
    case Ending::kGaveUp:
      return concat("rank ", call.other, " gave up waiting for rank ", call.detail);
    case Ending::kLate:
      return concat("rank ", call.other, " has not come within ", call.detail, " ms of rank ",
                    call.rank);
    case Ending::kDiffers:
      return concat(difference(call),
                    "; all ranks must make the same calls in the same order, and nothing was "
                    "moved");
    case Ending::kExcess:
      break;
  }
  return concat("rank ", call.other, " has ", call.excess.tokens, " tokens for rank ",
                call.excess.destination, ", which has room for ", call.excess.room,
                " of each rank; nothing was moved");
}

}  // namespace

Proposal proposal_of(const Peers* peers, const DispatchArgs& args) {
  Proposal proposal = proposal_of(
      peers, kDispatchCall,
      {args.x_recv, args.x_scales_recv, args.topk_idx_recv, args.topk_weights_recv}, args);
  proposal.overflow = args.overflow;
  return proposal;
}

Proposal proposal_of(const Peers* peers, const CombineArgs& args) {
  return proposal_of(peers, kCombineCall, {args.rows, args.topk_weights_recv}, args);
}

Status status_of(const EndedCall& call) {
  const bool for_good = call.ending == Ending::kLeft || call.ending == Ending::kGaveUp ||
                        call.ending == Ending::kLate;
  return {for_good ? Code::kRankFailed : Code::kInvalidArgument,
          concat(collective_of(call.proposal).name, ": ", reason_of(call),
                 for_good ? "; calls of these ranks fail from now on" : "")};
}

Exchange::~Exchange() {
  if (!is_entered_) return;
  if (is_between_) peers_->leave(has_left(rank()));  // its work failed, and the others wait for it
  std::atomic_ref(peers_->header(rank()).turn).fetch_and(~int64_t{1}, std::memory_order_release);
}

Status Exchange::ended(Ending ending, int64_t other, int64_t detail) const {
  EndedCall call{ending, rank(), other, detail, proposal_, {}, {}};
  if (ending == Ending::kDiffers) call.theirs = post(rank(), static_cast<int>(other)).proposal;
  if (ending == Ending::kExcess) call.excess = post(rank(), static_cast<int>(other)).excess;
  return status_of(call);
}

Status Exchange::begin(const Excess& excess) {
  if (peers_ == nullptr) {
    if (excess.tokens == 0) return {};
    return status_of({Ending::kExcess, 0, 0, 0, proposal_, {}, excess});
  }
  std::atomic_ref turn(peers_->header(rank()).turn);
  if (turn.fetch_or(1, std::memory_order_acquire) % 2 != 0) return ended(Ending::kBusy, rank());
  is_entered_ = true;
  MOIRE_RETURN_IF_ERROR(meet(excess));
  // Every rank finds the same, in the same order.
  for (int other = 0; other < size(); ++other) {
    const Proposal& theirs = post(rank(), other).proposal;
    if (std::memcmp(&theirs, &proposal_, sizeof(theirs)) != 0) {
      return ended(Ending::kDiffers, other);
    }
  }
  for (int other = 0; other < size(); ++other) {
    if (post(rank(), other).excess.tokens != 0) return ended(Ending::kExcess, other);
  }
  is_between_ = true;
  return {};
}

Status Exchange::end() {
  is_between_ = false;
  return meet({});
}

Status Exchange::meet(const Excess& excess) {
  if (peers_ == nullptr) return {};
  MOIRE_RETURN_IF_ERROR(check_gone(false));
  epoch_ = std::atomic_ref(peers_->header(rank()).turn).fetch_add(2) / 2 + 1;
  tell_all(excess);
  const Clock::time_point deadline = Clock::now() + peers_->timeout;
  for (int other = 0; other < size(); ++other) MOIRE_RETURN_IF_ERROR(wait_for(other, deadline));
  return {};
}

void Exchange::tell_all(const Excess& excess) const {
  for (int other = 0; other < size(); ++other) {
    Mailbox::Post& told = post(other, rank());
    told.proposal = proposal_;
    told.excess = excess;
    std::atomic_ref(told.epoch).store(epoch_, std::memory_order_release);
  }
}

bool Exchange::has_come(int other) const {
  return std::atomic_ref(post(rank(), other).epoch).load(std::memory_order_acquire) == epoch_;
}

Status Exchange::wait_for(int other, Clock::time_point deadline) const {
  auto pause = kShortest;
  for (int i = 0;; ++i) {
    // Asked before it looks: a thread that was stopped in between finds who came meanwhile.
    const bool is_late = i >= kYields && Clock::now() > deadline;
    if (has_come(other)) return {};
    MOIRE_RETURN_IF_ERROR(check_gone(true));
    if (i < kYields) {
      std::this_thread::yield();
      continue;
    }
    if (is_late) {
      peers_->leave(did_not_come(other));
      return ended(Ending::kLate, other, peers_->timeout.count());
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongest);
  }
}

// Another that has come to this meeting may have left since: after the last of its last call, while
// others are still on their way out. Whoever fails because of a rank that left says so to all,
// since those for whom that rank has come would wait for this one.
Status Exchange::check_gone(bool has_told) const {
  for (int other = 0; other < size(); ++other) {
    const int64_t why =
        std::atomic_ref(peers_->mailbox(rank(), other).gone).load(std::memory_order_acquire);
    if (why == 0) continue;
    if (why > 0) return ended(Ending::kGaveUp, other, why - 1);
    if (has_told && other != rank() && has_come(other)) continue;
    peers_->leave(why);
    return ended(Ending::kLeft, -1 - why);
  }
  return {};
}

void check_window(ArgumentCheck& check, std::string_view name, const TensorView& t) {
  const Peers* peers = peers_of(check.context());
  if (!check.ok() || check.context().is_explaining() || t.num_elements() == 0) return;
  if (peers == nullptr || peers->size() == 1) return;
  const auto begin = reinterpret_cast<uintptr_t>(peers->window(peers->rank));
  const auto data = reinterpret_cast<uintptr_t>(t.data);
  const auto bytes = static_cast<uintptr_t>(span_bytes(t));
  const bool lies_inside =
      data >= begin && bytes <= peers->window_bytes && data - begin <= peers->window_bytes - bytes;
  check.require(lies_inside, name, " is ", t, " outside the window of rank ", peers->rank,
                ", must lie in its ", peers->window_bytes, " bytes");
}

}  // namespace moire
