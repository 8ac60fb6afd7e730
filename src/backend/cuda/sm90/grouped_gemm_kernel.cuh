// The SM90 grouped GEMM: persistent blocks, one per multiprocessor, of one producer warpgroup and
// two or three consumer warpgroups; BF16 operands, FP32 sums.
//
// Roles
//   scheduler  warp 1: draws this block's next tile when the producer nears the end of the last,
//              and finds it in the device's offsets
//   producer   warp 0, one thread: fills the ring of stages by TMA
//   consumers  warps 4 and up: wgmma on 64 rows a warpgroup (in turn on 128), then the epilogue,
//              each warp on 16 rows at a time through its own slots; no barrier between consumers,
//              so that one warpgroup multiplies while the other stores
// Barriers (arrivals)
//   full[stage]       1 and the bytes of A and B
//   empty[stage]      1 a warpgroup (in turn 1: of the one whose tile it is)
//   tile_full[tile]   1, the scheduler
//   tile_empty[tile]  1 a warp, and 1 of the producer, which keeps a tile until nearly the end
//   slot_full[slot]   1 and the bytes of an epilogue's operands (epilogues that load)
//   turn[warpgroup]   4, the other warpgroup's warps when their last products are issued (where
//                     they alternate)
// Sums are in ascending K, 16 at a time, in every instance.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backend/cuda/device/report.cuh"
#include "backend/cuda/device/ring.cuh"
#include "backend/cuda/device/tile_walk.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/sm90/warp_slots.cuh"

namespace moire::cuda::sm90 {

template <class P>
struct Stage {
  alignas(1024) char a[P::kABytes];
  alignas(1024) char b[P::kBBytes];
};

template <class P>
struct SharedMemory {
  Stage<P> stages[P::kNumStages];
  alignas(1024) char slots[P::kConsumerWarps][P::kNumSlots][P::kSlotBytes];
  WorkTile tiles[P::kNumTiles];
  uint64_t full[P::kNumStages], empty[P::kNumStages];
  uint64_t tile_full[P::kNumTiles], tile_empty[P::kNumTiles];
  uint64_t slot_full[P::kConsumerWarps][P::kNumSlots];
  uint64_t turn[P::kConsumers];
};

// Dynamic shared memory starts at 16 bytes' alignment only.
template <class P>
inline constexpr size_t kSharedBytes = sizeof(SharedMemory<P>) + 1024 - 16;

// What the kernel is instantiated with, besides the policy:
// Operands: kA, kB (majorness); walk(); load(stage, barrier, tile, k) of all of P's bytes.
// Epilogue: begin(slots, tile, row), early in the main loop of a tile with products;
// store(slots, tile, row, sums), after it. An epilogue with a type Left leaves a part of its work
// to the next main loop: store(..., left) fills one in, and advance(slots, left) does a piece of
// it.
template <class Operands, class Epilogue>
struct Parameters {
  Operands operands;
  Epilogue epilogue;
  moire_groups groups;
  uint32_t* tile_counter;  // 0 at the start and at the end (runtime/tile_counters.h), or null
  Reporter reporter;
};

template <class P>
__device__ void initialize_barriers(SharedMemory<P>& s) {
  for (int i = 0; i < P::kNumStages; ++i) {
    ptx::mbarrier_init(&s.full[i], 1);
    ptx::mbarrier_init(&s.empty[i], P::kAlternates ? 1 : P::kConsumers);
  }
  for (int i = 0; i < P::kNumTiles; ++i) {
    ptx::mbarrier_init(&s.tile_full[i], 1);
    ptx::mbarrier_init(&s.tile_empty[i], 1 + P::kConsumerWarps);
  }
  for (auto& warp : s.slot_full) {
    for (uint64_t& barrier : warp) ptx::mbarrier_init(&barrier, 1);
  }
  for (uint64_t& turn : s.turn) ptx::mbarrier_init(&turn, P::kWarpsOfConsumer);
  ptx::fence_mbarrier_init();
}

// The number of the tile after `index`. Drawn from a counter, tiles start in order on whatever
// block is free: neighbours run side by side and share operands in the L2, and all blocks end
// together. Without a counter, every block takes its share.
__device__ inline int32_t next_index(int32_t index, uint32_t* counter) {
  if (counter == nullptr) return index + static_cast<int32_t>(gridDim.x);
  uint32_t drawn = 0;
  if (threadIdx.x % 32 == 0) drawn = gridDim.x + atomicAdd(counter, 1u);
  return static_cast<int32_t>(__shfl_sync(~0u, drawn, 0));
}

template <class P, class Operands>
__device__ void schedule_tiles(SharedMemory<P>& s, const Operands& operands,
                               const moire_groups& groups, uint32_t* counter) {
  auto walk = operands.template walk<P>(groups);
  Ring<P::kNumTiles> ring;
  for (auto index = static_cast<int32_t>(blockIdx.x);; index = next_index(index, counter)) {
    const WorkTile tile = walk.at(index);
    if (threadIdx.x % 32 == 0) {
      s.tiles[ring.stage] = tile;
      ptx::mbarrier_arrive(&s.tile_full[ring.stage]);
    }
    __syncwarp();
    ring.advance();
    if (!tile.is_valid) {
      // Every block that had a tile draws one number too many; the last of these ends the count.
      const bool is_last = index == walk.total() + static_cast<int32_t>(gridDim.x) - 1;
      if (counter != nullptr && is_last && threadIdx.x % 32 == 0) *counter = 0;
      return;
    }
    ring.wait_empty(s.tile_empty);
  }
}

// What lane 0 holds, in every lane.
__device__ inline WorkTile from_leader(WorkTile tile) {
  auto* words = reinterpret_cast<uint32_t*>(&tile);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(WorkTile) / sizeof(uint32_t)); ++i) {
    words[i] = __shfl_sync(~0u, words[i], 0);
  }
  return tile;
}

// A consumer warp's next tile; its place in the ring is given back. One lane waits, reads and gives
// back: lanes that left the wait one after the other would not meet again.
template <class P>
__device__ WorkTile next_tile(SharedMemory<P>& s, Ring<P::kNumTiles>& ring) {
  WorkTile tile = {};
  if (threadIdx.x % 32 == 0) {
    ring.wait_full(s.tile_full);
    tile = s.tiles[ring.stage];
    ptx::mbarrier_arrive(&s.tile_empty[ring.stage]);
  }
  ring.advance();
  return from_leader(tile);
}

template <class P, class Operands>
__device__ void produce(SharedMemory<P>& s, const Operands& operands) {
  constexpr int kStepsToDraw = 4;  // in which the scheduler finds the next tile
  Ring<P::kNumTiles> tiles;
  Ring<P::kNumStages> ring;
  for (;; tiles.advance()) {
    tiles.wait_full(s.tile_full);
    const WorkTile tile = s.tiles[tiles.stage];
    if (!tile.is_valid) return;
    const auto load = [&](int begin, int end) {
      for (int k = begin; k < end; ++k, ring.advance()) {
        ring.wait_empty(s.empty);
        ptx::mbarrier_arrive_expect_tx(&s.full[ring.stage], P::kABytes + P::kBBytes);
        operands.template load<P>(s.stages[ring.stage], &s.full[ring.stage], tile, k * P::kTileK);
      }
    };
    const int near_end = max(tile.num_k - kStepsToDraw, 0);
    load(0, near_end);
    ptx::mbarrier_arrive(&s.tile_empty[tiles.stage]);
    load(near_end, tile.num_k);
  }
}

// Sums of a warpgroup: 64 rows a block.
template <class P>
using Sums = float[P::kRowBlocks][P::kTileN / 2];

// Issues the products of row blocks first ... first + kBlocks - 1 of a stage.
template <class P, class Operands, int kBlocks>
__device__ void multiply_stage(Sums<P>& sums, const Stage<P>& stage, int first) {
  constexpr int kN = P::kInstructionN;
  // 64 rows of an operand are 8 KiB in either majorness, and lie one after another.
  constexpr uint32_t kPanelBytes = 64 * P::kTileK * 2;
  constexpr uint64_t kNextPanel = kPanelBytes >> 4;  // in a descriptor
  const uint64_t a =
      ptx::operand_descriptor(ptx::shared_address(stage.a + first * kPanelBytes), kPanelBytes);
  const uint64_t b = ptx::operand_descriptor(ptx::shared_address(stage.b), kPanelBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < P::kTileK / 16; ++i) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int part = 0; part < P::kTileN / kN; ++part) {
        ptx::wgmma_m64k16<kN, Operands::kA, Operands::kB>(
            reinterpret_cast<float(&)[kN / 2]>(sums[block][part * kN / 2]),
            a + i * ptx::kDescriptorStep<Operands::kA> + block * kNextPanel,
            b + i * ptx::kDescriptorStep<Operands::kB> + part * (kN / 64) * kNextPanel, 1);
      }
    }
  }
  ptx::wgmma_commit_group();
}

template <class P>
__device__ void give_back(SharedMemory<P>& s, int stage) {
  if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(&s.empty[stage]);
}

// `begin` is called some steps after the start: what it waits for, the last tile's stores, is then
// over; `advance` in every step, while products are under way; `issued` once, when the last
// products are on their way. A stage is given back when its products are done; warpgroups that
// alternate keep one stage in flight, because nobody else keeps the tensor cores busy meanwhile.
template <class P, class Operands, int kBlocks, class Begin, class Advance, class Issued>
__device__ void multiply(SharedMemory<P>& s, Ring<P::kNumStages>& ring, int num_k, int first_block,
                         Sums<P>& sums, Begin&& begin, Advance&& advance, Issued&& issued) {
  constexpr int kBeginStep = P::kAlternates ? 0 : 4, kInFlight = P::kAlternates ? 1 : 0;
  const int begin_step = min(kBeginStep, num_k - 1);
  [[maybe_unused]] int last = 0;
  if (kBeginStep == 0 && num_k > 0) begin();
  for (int k = 0; k < num_k; ++k, ring.advance()) {
    ring.wait_full(s.full);
    if (kBeginStep > 0 && k == begin_step) begin();
    multiply_stage<P, Operands, kBlocks>(sums, s.stages[ring.stage], first_block);
    advance();
    ptx::wgmma_wait_group<kInFlight>();
    if (kInFlight == 0) give_back(s, ring.stage);
    if (kInFlight == 1 && k > 0) give_back(s, last);
    if constexpr (kInFlight == 1) last = ring.stage;
  }
  issued();
  if (kInFlight == 1) {
    ptx::wgmma_wait_group<0>();
    if (num_k > 0) give_back(s, last);
  }
}

// Whose tile it is, where two warpgroups alternate. A warpgroup waits until the other has issued
// all its products, so that it has seen every stage before this warpgroup's first: else a stage's
// barrier could be a whole round behind, which its parity does not tell. The products themselves
// may still run; the tensor cores then go on without a gap.
template <class P>
class Turns {
 public:
  __device__ Turns(SharedMemory<P>& s, int consumer) : s_(s), consumer_(consumer) {}

  // Goes on to the next tile, and says whose it is; called once a tile.
  __device__ bool next_is_mine() {
    if constexpr (!P::kAlternates) return true;
    return (next_++ & 1) == consumer_;
  }
  __device__ void wait() {
    if constexpr (!P::kAlternates) return;
    // Tile 2 i + consumer is the i-th; the first warpgroup's first turn needs no leave.
    const int round = (next_ - 1) / 2 - (consumer_ == 0 ? 1 : 0);
    ptx::mbarrier_wait_parity(&s_.turn[consumer_], static_cast<uint32_t>(round) & 1);
  }
  __device__ void pass_on() {
    if constexpr (!P::kAlternates) return;
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&s_.turn[1 - consumer_]);
  }

 private:
  SharedMemory<P>& s_;
  int consumer_;
  int next_ = 0;
};

// A warpgroup none of whose rows exist multiplies nothing, but keeps the ring's pace. Its warps
// keep together, as products would make them: one that is still in its last epilogue could else
// find a stage two rounds on, which the barrier's parity does not tell, and wait for ever.
template <class P>
__device__ void pass(SharedMemory<P>& s, Ring<P::kNumStages>& ring, int num_k, int consumer) {
  for (int k = 0; k < num_k; ++k, ring.advance()) {
    ring.wait_full(s.full);
    ptx::sync_warpgroup(consumer);
    give_back(s, ring.stage);
  }
}

// The part of an epilogue's work that is left to the next main loop.
template <class Epilogue>
struct LeftOf {
  struct Type {};
  static constexpr bool kIsAny = false;
};
template <class Epilogue>
requires requires { typename Epilogue::Left; }
struct LeftOf<Epilogue> {
  using Type = typename Epilogue::Left;
  static constexpr bool kIsAny = true;
};

// Of the 16 rows in a block of 64 that are this warp's.
__device__ inline int first_row_of_warp(const WorkTile& tile, int block) {
  return tile.first_m + block * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
}

template <class P, class Operands, class Epilogue>
__device__ void consume(SharedMemory<P>& s, const Operands& operands, const Epilogue& epilogue) {
  const int warp = static_cast<int>(threadIdx.x) / 32 - 4, consumer = warp / 4;
  const int first_block = P::kAlternates ? 0 : consumer;
  WarpSlots<P> slots{s.slots[warp], s.slot_full[warp]};
  Ring<P::kNumTiles> tiles;
  Ring<P::kNumStages> ring;
  Turns<P> turns(s, consumer);
  typename LeftOf<Epilogue>::Type left;
  const auto advance = [&] {
    if constexpr (LeftOf<Epilogue>::kIsAny) epilogue.advance(slots, left);
  };
  const auto store = [&](const WorkTile& tile, int first_m, auto& sums) {
    if constexpr (LeftOf<Epilogue>::kIsAny) {
      epilogue.store(slots, tile, first_m, sums, left);
    } else {
      epilogue.store(slots, tile, first_m, sums);
    }
  };
  for (WorkTile tile = next_tile(s, tiles); tile.is_valid; tile = next_tile(s, tiles)) {
    if (!turns.next_is_mine()) {
      ring.skip(tile.num_k);
      continue;
    }
    turns.wait();
    const int32_t rows = operands.rows_of_output(tile) - tile.first_m - first_block * 64;
    if (rows <= 0) {  // never where warpgroups alternate, whose turn would end here
      pass(s, ring, tile.num_k, consumer);
      continue;
    }
    const auto begin = [&] { epilogue.begin(slots, tile, first_row_of_warp(tile, first_block)); };
    const auto pass_on = [&] { turns.pass_on(); };
    Sums<P> sums = {};
    if (P::kRowBlocks == 2 && rows > 64) {
      multiply<P, Operands, P::kRowBlocks>(s, ring, tile.num_k, first_block, sums, begin, advance,
                                           pass_on);
    } else {
      multiply<P, Operands, 1>(s, ring, tile.num_k, first_block, sums, begin, advance, pass_on);
    }
    const int first_m = first_row_of_warp(tile, first_block);
    store(tile, first_m, sums[0]);
    if (P::kRowBlocks == 2 && rows > 64) {
      if (tile.num_k > 0) epilogue.begin(slots, tile, first_m + 64);
      store(tile, first_m + 64, sums[P::kRowBlocks - 1]);
    }
  }
  if constexpr (LeftOf<Epilogue>::kIsAny) {
    while (left.is_any()) advance();
  }
  slots.finish();
}

template <class P, class Operands, class Epilogue>
__global__ void __launch_bounds__(P::kThreads, 1)
    grouped_gemm(const __grid_constant__ Parameters<Operands, Epilogue> p) {
  extern __shared__ char raw[];
  auto& s =
      *reinterpret_cast<SharedMemory<P>*>((reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) initialize_barriers(s);
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp >= 4) {
    ptx::setmaxnreg_inc<P::kConsumerRegisters>();
    consume<P>(s, p.operands, p.epilogue);
    return;
  }
  ptx::setmaxnreg_dec<P::kProducerRegisters>();
  if (warp == 0 && threadIdx.x == 0) produce<P>(s, p.operands);
  if (warp == 1) schedule_tiles<P>(s, p.operands, p.groups, p.tile_counter);
  if (warp == 2 && blockIdx.x == 0) {
    check_groups(p.groups, p.reporter, static_cast<int>(threadIdx.x) % 32, 32);
  }
}

}  // namespace moire::cuda::sm90
