// How consumer warpgroups share the tiles and the ring of stages.
//
// The ring's invariant: a warp waits for round r of a stage only while the stage is in round r,
// that is, after round r - 1 was full and before round r + 1 is. A barrier tells rounds by their
// parity alone, so a warp that comes earlier is let through at once, to what the stage held before,
// and one that comes later waits for ever. Never earlier: a warp has itself waited for round r - 1,
// or has leave from the one that did (PingPong's turns). Never later: round r + 1 needs the stage
// given back, which one thread does for its warpgroup, after products of the stage; and products
// join the warpgroup's four warps. Where it multiplies nothing, a barrier joins them instead
// (follow).
// Both were seen broken: an unspecified launch failure, and a hang (tests/gpu/many_tiles_test.cpp).
#pragma once

#include <type_traits>

#include "backend/cuda/device/ring.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/sm90/shared_memory.cuh"

namespace moire::cuda::sm90 {

template <class P>
using StagesOf =
    std::conditional_t<P::kIsScaled, RestartedRing<P::kNumStages>, Ring<P::kNumStages>>;

// The warpgroup needs a stage no more; where scales lie in it, which no products join, each warp
// says so for itself.
template <class P>
__device__ void give_back(SharedMemory<P>& s, int stage) {
  if (P::kIsScaled) __syncwarp();
  if (threadIdx.x % (128 / P::kReturns) == 0) ptx::mbarrier_arrive(&s.empty[stage]);
}

// Every warpgroup multiplies its rows of every tile. While one is in its epilogue, the others
// keep the tensor cores busy.
template <class P>
class SideBySide {
 public:
  static constexpr int kInFlight = 0;  // stages whose products run on while the next are issued
  // When the epilogue's loads start, without scales (else load_step() says it): what they wait for,
  // the last tile's stores, is then over.
  static constexpr int kLoadStep = 4;

  __device__ SideBySide(SharedMemory<P>& s, int consumer) : s_(s), consumer_(consumer) {}

  // The first of this warpgroup's row blocks in a tile.
  __device__ int first_block() const { return consumer_ * P::kRowBlocks; }
  // Goes on to the next tile: whether it is this warpgroup's. Called once a tile.
  __device__ bool next_is_mine() { return true; }
  // Weights decoded here: a warpgroup begins a tile when the one before it has nearly multiplied
  // its first step. Left alone they would fall into step, all multiplying and all decoding at once.
  // Each warp passes the turn on for itself, when it has had its own: so a turn's next round is
  // never complete before its last one was waited for.
  __device__ void wait_for_turn() {
    if constexpr (!P::kTakesTurns) return;
    ptx::mbarrier_wait_parity(&s_.turn[consumer_], turn_ ^ (consumer_ == 0 ? 1 : 0));
    turn_ ^= 1;
  }
  __device__ void pass_on() {
    if constexpr (!P::kTakesTurns) return;
    const int next = consumer_ + 1 == P::kConsumers ? 0 : consumer_ + 1;
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&s_.turn[next]);
  }

  // A tile in which this warpgroup has no rows: it multiplies nothing, but keeps the ring's pace.
  __device__ void follow(StagesOf<P>& ring, int num_k) {
    pass_on();
    for (int k = 0; k < num_k; ++k, ring.advance()) {
      ring.wait_full(s_.full);
      ptx::sync_warpgroup(consumer_);
      give_back(s_, ring.stage);
    }
    ring.end_tile();
  }

 private:
  SharedMemory<P>& s_;
  int consumer_;
  uint32_t turn_ = 0;  // the parity of the next one
};

// Two warpgroups take tiles in turn. A turn begins when the other has issued its last products: it
// has then seen every stage before this turn's first. The products may still run, so that the
// tensor cores go on without a gap. Each warp passes the turn on for itself, for in tiles without
// products nothing else joins a warpgroup's warps.
template <class P>
class PingPong {
 public:
  static constexpr int kInFlight = 1;  // nobody else keeps the tensor cores busy meanwhile
  static constexpr int kLoadStep = 0;

  __device__ PingPong(SharedMemory<P>& s, int consumer) : s_(s), consumer_(consumer) {}

  __device__ int first_block() const { return 0; }
  __device__ bool next_is_mine() { return (next_++ & 1) == consumer_; }
  __device__ void wait_for_turn() {
    // Tile 2 i + consumer is the i-th; the first warpgroup's first turn needs no leave.
    const int round = (next_ - 1) / 2 - (consumer_ == 0 ? 1 : 0);
    ptx::mbarrier_wait_parity(&s_.turn[consumer_], static_cast<uint32_t>(round) & 1);
  }
  __device__ void pass_on() {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&s_.turn[1 - consumer_]);
  }

  // Every tile has rows for its one warpgroup.
  __device__ void follow(StagesOf<P>&, int) {}

 private:
  SharedMemory<P>& s_;
  int consumer_;
  int next_ = 0;
};

template <class P>
using ScheduleOf = std::conditional_t<P::kIsPingPong, PingPong<P>, SideBySide<P>>;

}  // namespace moire::cuda::sm90
