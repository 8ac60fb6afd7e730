#include "parallel/exchange.h"

#include <moire/roles.h>

#include <atomic>
#include <thread>

#include "core/status_macros.h"

namespace moire {
namespace {

// Ranks that compute reach a meeting within microseconds of each other; with more of them than
// cores, or with one that is late, the waiting should cost nothing.
constexpr int kYields = 200;
constexpr auto kShortest = std::chrono::microseconds(20), kLongest = std::chrono::microseconds(500);

constexpr Collective kDispatchCall = {
    1, "dispatch", {"x_recv", "x_scales_recv", "topk_idx_recv", "topk_weights_recv"}};
constexpr Collective kCombineCall = {2, "combine", {"rows", "topk_weights_recv", "", ""}};

// Rows alone have no experts.
int64_t num_experts_of(const auto& args) {
  return is_present(args.topk_idx) ? args.num_experts : 0;
}

std::string_view name_of(int64_t op) {
  return op == kDispatchCall.number ? kDispatchCall.name : kCombineCall.name;
}

bool are_equal(const moire_tensor& a, const moire_tensor& b) {
  return a.dtype == b.dtype && a.rank == b.rank && a.shape[0] == b.shape[0] &&
         a.shape[1] == b.shape[1] && a.row_stride == b.row_stride;
}

}  // namespace

Exchange::Exchange(const Context& context, const DispatchArgs& args)
    : Exchange(context, kDispatchCall,
               {args.x_recv, args.x_scales_recv, args.topk_idx_recv, args.topk_weights_recv},
               num_experts_of(args), args.overflow) {}

Exchange::Exchange(const Context& context, const CombineArgs& args)
    : Exchange(context, kCombineCall, {args.rows, args.topk_weights_recv}, num_experts_of(args)) {}

Exchange::Exchange(const Context& context, const Collective& collective,
                   std::initializer_list<TensorView> in_window, int64_t num_experts,
                   int64_t overflow)
    : collective_(collective), peers_(peers_of(context)) {
  if (peers_ == nullptr) return;
  proposal_.op = collective.number;
  proposal_.num_experts = num_experts;
  proposal_.overflow = overflow;
  auto* said = proposal_.tensors;
  for (const TensorView& t : in_window) {
    said->tensor = t;
    said->tensor.data = nullptr;
    said->tensor.row_stride = t.stride();
    if (t.num_elements() != 0) {
      said->offset = static_cast<std::byte*>(t.data) - peers_->window(peers_->rank);
    }
    ++said;
  }
}

Exchange::~Exchange() {
  if (!is_entered_) return;
  if (is_between_) leave(*peers_, has_left(rank()));  // its work failed, and the others wait for it
  std::atomic_ref(peers_->header(rank()).is_busy).store(0, std::memory_order_release);
}

Status Exchange::begin(const Excess& excess) {
  if (peers_ == nullptr) return excess.tokens == 0 ? Status() : refuse(0, excess);
  std::atomic_ref is_busy(peers_->header(rank()).is_busy);
  if (is_busy.exchange(1, std::memory_order_acquire) != 0) {
    return invalid(collective_.name, concat("rank ", rank(),
                                            " is in a call already, on another thread; a "
                                            "communicator takes one at a time"));
  }
  is_entered_ = true;
  MOIRE_RETURN_IF_ERROR(meet(excess));
  // Every rank finds the same, in the same order.
  for (int other = 0; other < size(); ++other) MOIRE_RETURN_IF_ERROR(compare(other));
  for (int other = 0; other < size(); ++other) {
    const Excess& theirs = post(rank(), other).excess;
    if (theirs.tokens != 0) return refuse(other, theirs);
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
  epoch_ = ++peers_->header(rank()).epoch;
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
      leave(*peers_, did_not_come(other));
      return failed(concat("rank ", other, " has not come within ", peers_->timeout.count(),
                           " ms of rank ", rank()));
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
    if (why > 0) return failed(concat("rank ", other, " gave up waiting for rank ", why - 1));
    if (has_told && other != rank() && has_come(other)) continue;
    leave(*peers_, why);
    return failed(concat("rank ", -1 - why, " has left"));
  }
  return {};
}

// What another rank calls is what this one calls.
Status Exchange::compare(int other) const {
  const Proposal& theirs = post(rank(), other).proposal;
  const auto differ = [&](std::string_view what) {
    return invalid(collective_.name, concat(what,
                                            "; all ranks must make the same calls in the "
                                            "same order, and nothing was moved"));
  };
  if (theirs.op != proposal_.op) {
    return differ(concat("rank ", other, " calls ", name_of(theirs.op), ", rank ", rank(), " ",
                         collective_.name));
  }
  for (int i = 0; i < Proposal::kMostTensors; ++i) {
    const auto &a = theirs.tensors[i], &b = proposal_.tensors[i];
    if (are_equal(a.tensor, b.tensor) && a.offset == b.offset) continue;
    return differ(concat(collective_.tensors[i], " is ", a.tensor, " at byte ", a.offset,
                         " of the window of rank ", other, " but ", b.tensor, " at byte ", b.offset,
                         " of that of rank ", rank()));
  }
  if (theirs.num_experts != proposal_.num_experts) {
    return differ(concat("num_experts is ", theirs.num_experts, " on rank ", other, " but ",
                         proposal_.num_experts, " on rank ", rank()));
  }
  if (theirs.overflow == proposal_.overflow) return {};
  return differ(concat("overflow is ", theirs.overflow, " on rank ", other, " but ",
                       proposal_.overflow, " on rank ", rank()));
}

Status Exchange::refuse(int whose, const Excess& excess) const {
  return invalid(
      collective_.name,
      concat("rank ", whose, " has ", excess.tokens, " tokens for rank ", excess.destination,
             ", which has room for ", excess.room, " of each rank; nothing was moved"));
}

Status Exchange::failed(std::string_view what) const {
  return {Code::kRankFailed,
          concat(collective_.name, ": ", what, "; calls of these ranks fail from now on")};
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
