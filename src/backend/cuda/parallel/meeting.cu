#include <algorithm>
#include <climits>

#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/parallel/meeting.h"
#include "core/format.h"

namespace moire::cuda {
namespace {

constexpr uint32_t kLeastThreads = 128;
static_assert(kMostRanks <= 1024, "a thread for each rank, in one block");
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kWords = sizeof(Proposal) / sizeof(int64_t);

__device__ Header& header_in(std::byte* memory) { return *reinterpret_cast<Header*>(memory); }
__device__ Mailbox& mailbox_in(std::byte* memory, int from) {
  return reinterpret_cast<Mailbox*>(memory + sizeof(Header))[from];
}
__device__ int64_t& word(Proposal& proposal, int i) {
  return reinterpret_cast<int64_t*>(&proposal)[i];
}
__device__ int64_t word(const Proposal& proposal, int i) {
  return reinterpret_cast<const int64_t*>(&proposal)[i];
}

// Release: everything that this thread knows to have been written, here and at other ranks, by
// itself, by its block before a barrier, and by kernels before this one, is there for whoever
// acquires the value.
__device__ void store_release(int64_t* p, int64_t v) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ int64_t load_acquire(const int64_t* p) {
  int64_t v;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
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
    if (is_alone()) return;
    own_ = m_.ranks.memory[m_.ranks.rank];
    if (is_rank()) inbox_ = &mailbox_in(own_, other_);
  }

  __device__ bool is_alone() const { return m_.ranks.memory == nullptr; }

  __device__ bool enter() const {
    if (is_alone()) return true;
    __shared__ bool was_busy;
    if (threadIdx.x == 0) {
      was_busy = atomicExch(&header_in(own_).is_busy, 1) != 0;
      __threadfence();
    }
    __syncthreads();
    // A call whose work failed never came to its last meeting, which would have ended it: its rank
    // has left.
    if (was_busy && nobody_is_gone() && threadIdx.x == 0) note(Ending::kBusy, m_.ranks.rank, 0);
    return !was_busy;
  }
  __device__ void exit() const {
    __syncthreads();
    if (is_alone() || threadIdx.x != 0) return;
    __threadfence();
    atomicExch(&header_in(own_).is_busy, 0);
  }

  // Tells all others, and waits for them.
  __device__ bool meet(const Excess& excess) {
    if (is_alone()) return true;
    if (!nobody_is_gone()) return false;
    __shared__ int64_t epoch;
    if (threadIdx.x == 0) epoch = ++header_in(own_).epoch;
    __syncthreads();
    epoch_ = epoch;
    for (int i = other_; i < m_.ranks.size * kWords; i += static_cast<int>(blockDim.x)) {
      word(post_at(i / kWords).proposal, i % kWords) = word(m_.proposal, i % kWords);
    }
    if (is_rank()) post_at(other_).excess = excess;
    __syncthreads();
    if (is_rank()) store_release(&post_at(other_).epoch, epoch_);
    return wait();
  }

  // Whether all call the same, and have room; every rank finds the same.
  __device__ bool agree() const {
    if (is_alone()) return true;
    bool differs = false, exceeds = false;
    if (is_rank()) {
      const Mailbox::Post& theirs = inbox_->posts[epoch_ % 2];
      for (int i = 0; i < kWords; ++i) {
        differs |= word(theirs.proposal, i) != word(m_.proposal, i);
      }
      exceeds = theirs.excess.tokens != 0;
    }
    int who = lowest(differs);
    const Ending ending = who >= 0 ? Ending::kDiffers : Ending::kExcess;
    if (who < 0) who = lowest(exceeds);
    if (who == other_) {
      const Mailbox::Post& theirs = inbox_->posts[epoch_ % 2];
      note(ending, who, 0, &theirs.proposal, theirs.excess);
    }
    return who < 0;
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
  __device__ bool is_rank() const { return other_ < m_.ranks.size; }
  // Where another rank finds what this one tells it.
  __device__ Mailbox::Post& post_at(int other) const {
    return mailbox_in(m_.ranks.memory[other], m_.ranks.rank).posts[epoch_ % 2];
  }

  __device__ bool nobody_is_gone() const {
    const int64_t why = is_rank() ? load_acquire(&inbox_->gone) : 0;
    const int who = lowest(why != 0);
    return who < 0 || fail(who, why);
  }

  __device__ bool wait() {
    const int64_t deadline = nanoseconds() + m_.timeout_ns;
    bool has_come = !is_rank();
    for (;;) {
      // Asked before it looks: a block that was stopped in between finds who came meanwhile.
      const bool is_late = nanoseconds() > deadline;
      int64_t why = 0;
      if (is_rank()) {
        why = load_acquire(&inbox_->gone);
        has_come = has_come || load_acquire(&inbox_->posts[epoch_ % 2].epoch) == epoch_;
        // Who left after its last call has come to it: only this rank's own leaving counts.
        if (why < 0 && has_come && other_ != m_.ranks.rank) why = 0;
      }
      if (const int who = lowest(why != 0); who >= 0) return fail(who, why);
      if (const int who = lowest(is_late && !has_come); who >= 0) return fail(who, 0);
      if (__syncthreads_and(has_come) != 0) return true;
    }
  }

  // Because of rank `who`, whose thread knows why; 0: it has not come. Unless that rank gave up,
  // which it told all, this one tells all as well, since they would wait for it.
  __device__ bool fail(int who, int64_t why) const {
    __shared__ int64_t told;
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
    if (told != 0 && is_rank()) {
      store_release(&mailbox_in(m_.ranks.memory[other_], m_.ranks.rank).gone, told);
    }
    return false;
  }

  const Meeting& m_;
  const Reporter& reporter_;
  int other_;
  std::byte* own_ = nullptr;
  Mailbox* inbox_ = nullptr;  // what thread r's rank tells this one
  int64_t epoch_ = 0;
};

// The first rank for which this one has more tokens than there is room for.
__device__ Excess excess_of(const Meeting& m) {
  const bool is_rank = m.counts != nullptr && static_cast<int>(threadIdx.x) < m.ranks.size;
  const int d = lowest(is_rank && m.counts[threadIdx.x] > m.room);
  return d < 0 ? Excess{} : Excess{m.counts[d], d, m.room};
}

__global__ void __launch_bounds__(kMostRanks)
    begin_kernel(const __grid_constant__ Meeting m, Reporter reporter) {
  if (threadIdx.x == 0) *m.goes = 0;
  const Excess excess = excess_of(m);
  Attendee attendee(m, reporter);
  if (!attendee.enter()) return;
  bool goes = attendee.meet(excess) && attendee.agree();
  if (attendee.is_alone() && excess.tokens != 0) {
    if (threadIdx.x == 0) attendee.note(Ending::kExcess, 0, 0, nullptr, excess);
    goes = false;
  }
  if (!goes) return attendee.exit();
  if (threadIdx.x == 0) *m.goes = 1;
}

__global__ void __launch_bounds__(kMostRanks)
    end_kernel(const __grid_constant__ Meeting m, Reporter reporter) {
  const bool goes = *m.goes != 0;
  __syncthreads();
  if (!goes) return;
  if (threadIdx.x == 0) *m.goes = 0;
  Attendee attendee(m, reporter);
  attendee.meet({});
  attendee.exit();
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
