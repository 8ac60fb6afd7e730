// Meetings on CUDA: a call of all ranks is three launches on the stream, of which the first and the
// last, of one block each, meet the other ranks; what lies between them may touch the windows of
// all and waits for nobody. So one block of every rank has to be resident at a time and no more,
// and kernel boundaries order what is moved before the last meeting's release.
//
// Which meeting it is, kernels count in device memory: a captured call is right at every replay,
// beside ranks that replay another graph or none.
#pragma once

#include <cstdint>
#include <mutex>

#include "backend/cuda/parallel/peers.h"
#include "backend/cuda/runtime/launch.h"
#include "parallel/exchange.h"

namespace moire::cuda {

// What kernels know of the ranks.
struct Ranks {
  std::byte* const* memory;  // of each, as this one reaches it; null: alone
  int rank, size;

#if defined(__CUDACC__)
  // What lies at p in this rank's window, in that of another.
  template <class T>
  __device__ T* at(int other, T* p) const {
    if (memory == nullptr) return p;
    const ptrdiff_t distance = memory[other] - memory[rank];
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + distance);
  }
#endif
};

// A meeting, as a kernel gets it.
struct Meeting {
  Ranks ranks;
  std::byte* own;  // this rank's memory
  Proposal proposal;
  uint32_t digest;        // of it, never 0
  const int64_t* counts;  // of tokens for each rank, judged by `room`; null: not judged
  int64_t room;
  int64_t timeout_ns;
  uint32_t* goes;  // 1 between the meetings of a call that goes on
};

class DeviceExchange {
 public:
  // `room` is for tokens of each rank; `counts` as above.
  template <class A>
  DeviceExchange(const Context& context, Launcher& launcher, const A& args, int64_t room,
                 const int64_t* counts = nullptr)
      : DeviceExchange(peers_of(context), launcher, room, counts) {
    meeting_.proposal = proposal_of(peers_of(context), args);
  }
  ~DeviceExchange();

  // The first meeting; where the call ends with it, `goes` stays 0, and the record says why.
  Status begin();
  Status end();

  const Ranks& ranks() const { return meeting_.ranks; }
  int64_t room() const { return meeting_.room; }
  // What kernels in between read first: they do nothing where it is 0.
  const uint32_t* goes() const { return meeting_.goes; }
  // Blocks that a kernel in between may have, for what the communicator may take; at least 2.
  uint32_t most_blocks() const;

 private:
  void meet(void (*kernel)(Meeting, Reporter));
  DeviceExchange(const Peers* peers, Launcher& launcher, int64_t room, const int64_t* counts);

  const Peers* peers_;  // null: alone
  Launcher& launcher_;
  bool is_between_ = false;  // the first meeting was launched, and not the last
  // Of another thread's call no launch comes between those of this one, on a stream of both.
  std::unique_lock<std::mutex> turn_;
  Meeting meeting_{};
  int num_multiprocessors_;
};

// Three of a call.
template <class A>
int64_t launches_of_call(const DeviceState&, const A&) {
  return 3;
}

}  // namespace moire::cuda
