#include <algorithm>
#include <climits>
#include <cuda/atomic>

#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/parallel/meeting.h"
#include "core/format.h"

namespace moire::cuda {
namespace {

constexpr uint32_t kLeastThreads = 128;
static_assert(kMostRanks <= 1024, "a thread for each rank, in one block");
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kWords = sizeof(Proposal) / sizeof(int64_t);

__device__ Mailbox& mailbox_in(std::byte* memory, int from) {
  return reinterpret_cast<Mailbox*>(memory + sizeof(Header))[from];
}
__host__ __device__ int64_t word(const Proposal& proposal, int i) {
  return reinterpret_cast<const int64_t*>(&proposal)[i];
}

// What other ranks read and write as well.
template <class T>
__device__ ::cuda::atomic_ref<T, ::cuda::thread_scope_system> common(T& word) {
  return ::cuda::atomic_ref<T, ::cuda::thread_scope_system>(word);
}
__device__ int64_t nanoseconds() {
  int64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}

// The lowest of the block's threads for which something holds; -1: none.
__device__ int lowest(bool holds) {
  __shared__ int first;
  if (__syncthreads_or(holds) == 0) return -1;
  if (threadIdx.x == 0) first = INT_MAX;
  __syncthreads();
  if (holds) atomicMin(&first, static_cast<int>(threadIdx.x));
  __syncthreads();
  return first;
}

// One rank's part of a meeting, by a block: thread r is for rank r. Every function that returns a
// bool is called by all threads, and returns the same to all: whether the call goes on.
class Attendee {
 public:
  __device__ Attendee(const Meeting& meeting, const Reporter& reporter)
      : m_(meeting), reporter_(reporter), other_(static_cast<int>(threadIdx.x)) {
    if (!is_alone() && is_rank()) inbox_ = &mailbox_in(m_.own, other_);
  }

  __device__ bool is_alone() const { return m_.ranks.memory == nullptr; }
  __device__ bool is_rank() const { return other_ < m_.ranks.size; }

  // The call's first meeting is next; or, of one that `is_under_way`, its last.
  __device__ bool enter(bool is_under_way) {
    if (is_alone()) return true;
    const int64_t why = is_rank() ? common(inbox_->gone).load(::cuda::memory_order_relaxed) : 0;
    // By another warp, where there is one, for a fence waits for what its thread has under way.
    __shared__ unsigned long long before;
    const bool asks = threadIdx.x == blockDim.x - 1;
    if (asks) before = is_under_way ? *turn() : atomicOr(turn(), 1ULL);
    // Whoever finds this rank come has what kernels before this one did behind it.
    if (is_rank()) __threadfence_system();
    const int who = lowest(why != 0);
    const bool was_busy = !is_under_way && before % 2 != 0;
    epoch_ = static_cast<int64_t>(before / 2) + 1;
    if (who >= 0) return fail(who, why);
    // Not a call whose work failed, which is under way for good: its rank has left.
    if (was_busy && threadIdx.x == 0) note(Ending::kBusy, m_.ranks.rank, 0);
    return !was_busy;
  }
  // This meeting is over; whether the call goes on. One that failed stays under way for good.
  __device__ void exit(bool goes_on) const {
    if (threadIdx.x != 0) return;
    *m_.goes = goes_on ? 1 : 0;
    if (!is_alone() && !has_failed_) atomicAdd(turn(), goes_on ? 2ULL : 1ULL);
  }

  // Tells all what is called, by its digest, in full where digests differ, and waits for them.
  __device__ bool meet(uint32_t digest, const Excess& excess) {
    if (is_alone()) {
      if (excess.tokens != 0 && threadIdx.x == 0) note(Ending::kExcess, 0, 0, nullptr, excess);
      return excess.tokens == 0;
    }
    const auto number = static_cast<uint32_t>(epoch_), slot = number % 2;
    if (is_rank()) {
      const uint64_t said = uint64_t{number} << 32 | (excess.tokens == 0 ? digest : 0);
      common(mailbox_at(other_).calls[slot]).store(said, ::cuda::memory_order_relaxed);
    }
    uint64_t theirs = 0;
    const bool have_come = wait([&] {
      theirs = common(inbox_->calls[slot]).load(::cuda::memory_order_acquire);
      return theirs >> 32 == number;
    });
    if (!have_come) return false;
    const bool differs = is_rank() && static_cast<uint32_t>(theirs) != digest;
    return __syncthreads_or(differs) == 0 || agree(excess);
  }

  // Writes what ended the call where the host finds it, unless something is there already.
  __device__ void note(Ending ending, int64_t other, int64_t detail,
                       const Proposal* theirs = nullptr, const Excess& excess = {}) const {
    if (atomicExch(reporter_.is_claimed, 1U) != 0) return;
    EndedCall& call = *reporter_.record->call;
    call.ending = ending;
    call.rank = m_.ranks.rank;
    call.other = other;
    call.detail = detail;
    call.proposal = m_.proposal;
    if (theirs != nullptr) call.theirs = *theirs;
    call.excess = excess;
    __threadfence_system();
    reporter_.record->finding = Finding::kEndedCall;
  }

 private:
  __device__ unsigned long long* turn() const {
    return reinterpret_cast<unsigned long long*>(&reinterpret_cast<Header*>(m_.own)->turn);
  }
  // Where another rank finds what this one tells it.
  __device__ Mailbox& mailbox_at(int other) const {
    return mailbox_in(m_.ranks.memory[other], m_.ranks.rank);
  }

  // Until every rank `has_come`, which its thread asks.
  template <class HasCome>
  __device__ bool wait(const HasCome& has_come) {
    constexpr int kPolls = 16;  // until all look at the clock, and for who is gone
    const int64_t deadline = nanoseconds() + m_.timeout_ns;
    bool is_there = !is_rank();
    for (;;) {
      for (int i = 0; i < kPolls && !is_there; ++i) is_there = has_come();
      if (__syncthreads_and(is_there) != 0) return true;
      const bool is_late = nanoseconds() > deadline;
      int64_t why = is_rank() ? common(inbox_->gone).load(::cuda::memory_order_acquire) : 0;
      // It may have come before it went, or while this block was stopped.
      is_there = is_there || has_come();
      // Who left after its last call has come to it: only this rank's own leaving counts.
      if (why < 0 && is_there && other_ != m_.ranks.rank) why = 0;
      if (const int who = lowest(why != 0); who >= 0) return fail(who, why);
      if (const int who = lowest(is_late && !is_there); who >= 0) return fail(who, 0);
    }
  }

  // Where not all say the same, or one has an excess: who says what. All ranks find the same.
  __device__ bool agree(const Excess& excess) {
    const auto slot = epoch_ % 2;
    if (is_rank()) {
      Mailbox::Post& post = mailbox_at(other_).posts[slot];
      post.proposal = m_.proposal;
      post.excess = excess;
      common(post.epoch).store(epoch_, ::cuda::memory_order_release);
    }
    const Mailbox::Post* const theirs = is_rank() ? &inbox_->posts[slot] : nullptr;
    const auto has_come = [&] {
      return common(theirs->epoch).load(::cuda::memory_order_acquire) == epoch_;
    };
    if (!wait(has_come)) return false;
    bool differs = false;
    for (int i = 0; is_rank() && i < kWords; ++i) {
      differs |= word(theirs->proposal, i) != word(m_.proposal, i);
    }
    int who = lowest(differs);
    const Ending ending = who >= 0 ? Ending::kDiffers : Ending::kExcess;
    if (who < 0) who = lowest(is_rank() && theirs->excess.tokens != 0);
    if (who == other_) note(ending, who, 0, &theirs->proposal, theirs->excess);
    return who < 0;
  }

  // Because of rank `who`, whose thread knows why; 0: it has not come. Unless that rank gave up,
  // which it told all, this one tells all as well, since they would wait for it.
  __device__ bool fail(int who, int64_t why) {
    __shared__ int64_t told;
    has_failed_ = true;
    if (who == other_) {
      if (why > 0) {
        note(Ending::kGaveUp, who, why - 1);
      } else if (why < 0) {
        note(Ending::kLeft, -1 - why, 0);
      } else {
        note(Ending::kLate, who, m_.timeout_ns / 1'000'000);
      }
      told = why > 0 ? 0 : why < 0 ? why : 1 + int64_t{who};
    }
    __syncthreads();
    const bool tells = told != 0 && is_rank();
    if (tells) common(mailbox_at(other_).gone).store(told, ::cuda::memory_order_release);
    return false;
  }

  const Meeting& m_;
  const Reporter& reporter_;
  int other_;
  Mailbox* inbox_ = nullptr;  // what thread r's rank tells this one
  int64_t epoch_ = 0;
  bool has_failed_ = false;
};

__global__ void __launch_bounds__(kMostRanks)
    begin_kernel(const __grid_constant__ Meeting m, Reporter reporter) {
  Attendee attendee(m, reporter);
  if (threadIdx.x == 0) *m.goes = 0;
  const int64_t tokens =
      m.counts != nullptr && attendee.is_rank() ? m.counts[threadIdx.x] : int64_t{0};
  if (!attendee.enter(false)) return;
  // The first rank for which this one has more tokens than there is room for.
  const int to = lowest(tokens > m.room);
  const Excess excess = to < 0 ? Excess{} : Excess{m.counts[to], to, m.room};
  attendee.exit(attendee.meet(m.digest, excess));
}

__global__ void __launch_bounds__(kMostRanks)
    end_kernel(const __grid_constant__ Meeting m, Reporter reporter) {
  Attendee attendee(m, reporter);
  if (__syncthreads_or(*m.goes != 0) == 0 || !attendee.enter(true)) return;
  attendee.meet(0, {});
  attendee.exit(false);
}

// Calls that differ have the same digest once in 2^31.
uint32_t digest_of(const Proposal& proposal) {
  uint64_t digest = 0;
  for (int i = 0; i < kWords; ++i) {
    digest = (digest ^ static_cast<uint64_t>(word(proposal, i))) * 0x9E3779B97F4A7C15U;
    digest ^= digest >> 32;
  }
  return static_cast<uint32_t>(digest) | 1;
}

}  // namespace

DeviceExchange::DeviceExchange(const Peers* peers, Launcher& launcher, int64_t room,
                               const int64_t* counts)
    : peers_(peers),
      launcher_(launcher),
      turn_(launcher.state().calls),
      num_multiprocessors_(launcher.state().num_multiprocessors) {
  meeting_.ranks = {nullptr, 0, 1};
  meeting_.counts = counts;
  meeting_.room = room;
  // Not a tile counter, which a product of another thread may take in between.
  if (launcher.ok()) meeting_.goes = launcher.state().call_words.next(launcher.stream());
  if (peers == nullptr) return;
  const auto& own = static_cast<const CudaPeers&>(*peers);
  meeting_.ranks = {own.table, own.rank, own.size()};
  meeting_.own = own.memory[static_cast<size_t>(own.rank)];
  meeting_.timeout_ns = std::chrono::nanoseconds(own.timeout).count();
  if (own.max_multiprocessors != 0) {
    num_multiprocessors_ = std::min(num_multiprocessors_, own.max_multiprocessors);
  }
}

// A launch failed, and the others wait for this rank: unless it was captured, and nothing runs.
DeviceExchange::~DeviceExchange() {
  if (!is_between_ || peers_ == nullptr) return;
  cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(launcher_.stream(), &captured);
  if (captured == cudaStreamCaptureStatusNone) peers_->leave(has_left(peers_->rank));
}

Status DeviceExchange::begin() {
  if (launcher_.ok() && meeting_.goes == nullptr) {
    cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(launcher_.stream(), &captured);
    if (error != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return cuda_error(launcher_.reporter().op, "cudaStreamIsCapturing", error);
    }
    return {Code::kOutOfMemory,
            concat(launcher_.reporter().op,
                   ": at most 65,536 streams and captured calls of a context have a word of its "
                   "device's memory each, and all are given away")};
  }
  meeting_.digest = digest_of(meeting_.proposal);
  meet(begin_kernel);
  is_between_ = launcher_.ok();
  return {};
}

Status DeviceExchange::end() {
  meet(end_kernel);
  is_between_ = is_between_ && !launcher_.ok();
  return launcher_.status();
}

void DeviceExchange::meet(void (*kernel)(Meeting, Reporter)) {
  const auto threads = static_cast<uint32_t>(round_up(meeting_.ranks.size, kWarp));
  launcher_.launch(kernel, {1, std::max(threads, kLeastThreads)}, meeting_, launcher_.reporter());
}

uint32_t DeviceExchange::most_blocks() const {
  return static_cast<uint32_t>(num_multiprocessors_ * kBlocksPerMultiprocessor);
}

cudaError_t load_meetings() { return load(begin_kernel, end_kernel); }

}  // namespace moire::cuda
