// The SM90 grouped GEMM: persistent blocks, at most one per multiprocessor, of one producer
// warpgroup and two or three consumer warpgroups; BF16 or FP8 operands, FP32 sums.
//
// Roles
//   scheduler  warp 1: draws this block's next tile when the producer nears the end of the last,
//              and finds it in the device's offsets, and its matrix among the weights'
//   producer   warp 0, one lane: fills the ring of stages by TMA
//   examiner   warp 3, of operands with scales: whether a tile needs care (careful_tiles.cuh)
//   consumers  warps 4 and up: products of a tile (main_loop.cuh), by warpgroup, as the schedule
//              has it (schedules.cuh); then its epilogue in pieces (pieces.cuh), by warp, 16 rows
//              of the 64 that go through the warpgroup's buffers and are copied at once (of FP32
//              and FP8 the warp's own, with no barrier between warps; of FP8 sent off in the next
//              tile's first step)
// Barriers (arrivals)
//   full[stage]          1 and the bytes of A and B, and of scales that come with them
//   empty[stage]         1 a warpgroup (ping-pong 1: of the one whose tile it is); where scales
//                        come with it, 1 a warp, the examiner's too
//   tile_full[tile]      1, the scheduler
//   tile_empty[tile]     1 a warp, or with scales 1 a lane and the examiner's, too; and 1 of the
//                        producer, which keeps a tile until nearly the end
//   examined.done[place] 1, the examiner
//   buffer_full[buffer]  1 and the bytes of an epilogue's operands (epilogues that load)
//   turn[warpgroup]      4, the warps of the warpgroup before it when their last products are
//                        issued (ping-pong), or their first nearly done (decoding)
#pragma once

#include "backend/cuda/device/ring.cuh"
#include "backend/cuda/device/tile_walk.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/warps.cuh"
#include "backend/cuda/sm90/careful_tiles.cuh"
#include "backend/cuda/sm90/decoding_main_loop.cuh"
#include "backend/cuda/sm90/operands.cuh"
#include "backend/cuda/sm90/pieces.cuh"
#include "backend/cuda/sm90/scaled_main_loop.cuh"

namespace moire::cuda::sm90 {

// What the kernel is instantiated with, besides the policy:
// Operands: kA, kB (majorness); walk(); stage_bytes(tile), that fill a stage; load(stage, barrier,
// tile, k); rows_of_output(tile), from the group's first; where weights are decoded, weights() and
// blocks() instead.
// Epilogue: see pieces.cuh; or take() (decoding_epilogue.cuh).
template <class Operands, class Epilogue>
struct Parameters {
  Operands operands;
  Epilogue epilogue;
  moire_groups groups;
  MatrixNumbers matrices;
  uint32_t* tile_counter;  // 0 at the start and at the end (runtime/tile_counters.h), or null
  Reporter reporter;
};

// The number of the tile after `index`. Drawn from a counter, tiles start in order on whatever
// block is free: neighbours run side by side and share operands in the L2, and all blocks end
// together. Without a counter, every block takes its share.
__device__ inline int32_t next_index(int32_t index, uint32_t* counter) {
  if (counter == nullptr) return index + static_cast<int32_t>(gridDim.x);
  uint32_t drawn = 0;
  if (threadIdx.x % 32 == 0) drawn = gridDim.x + atomicAdd(counter, 1u);
  return static_cast<int32_t>(__shfl_sync(~0u, drawn, 0));
}

// Whether nearly all tiles of the waves before that of tile `index` came to their ends, once they
// have, or after most of a long tile's time. Tiles that share operands drift apart, for those at a
// group's end are shorter; over few steps in K the L2 holds what the last of them will read, over
// hundreds each reads its own from memory. Tiles of a wave start together, then. Nothing rests on
// it: blocks may be missing, where another kernel has their multiprocessors.
__device__ inline bool is_in_step(int32_t index, int32_t num_k, const uint32_t* counter) {
  constexpr int32_t kLongSum = 192;
  const uint32_t blocks = gridDim.x, before = index / blocks * blocks;
  if (num_k < kLongSum || before == 0) return true;
  // A read of the counter takes about half a step's time.
  for (int32_t i = 0; i < 2 * num_k; ++i) {
    if (*static_cast<const volatile uint32_t*>(counter) + blocks / 8 >= before) return true;
  }
  return false;
}

template <class P, class Operands, class Epilogue>
__device__ void schedule_tiles(SharedMemory<P>& s, const Parameters<Operands, Epilogue>& p) {
  auto walk = p.operands.template walk<P>(p.groups);
  uint32_t* const counter = p.tile_counter;
  Ring<P::kNumTiles> ring;
  const auto hand_out = [&](const WorkTile& tile) {
    if (threadIdx.x % 32 == 0) {
      s.tiles[ring.stage] = tile;
      ptx::mbarrier_arrive(&s.tile_full[ring.stage]);
    }
    __syncwarp();
    ring.advance();
    if (tile.is_valid) ring.wait_empty(s.tile_empty);
  };
  bool keeps_step = counter != nullptr;
  auto index = static_cast<int32_t>(blockIdx.x);
  for (int32_t number = 0;; ++number, index = next_index(index, counter)) {
    WorkTile tile = walk.at(index);
    if constexpr (P::kIsScaled) {
      if (!tile.is_valid) hand_out_again(s, hand_out);
    }
    if (threadIdx.x % 32 == 0) {
      if (keeps_step && tile.is_valid) keeps_step = is_in_step(index, tile.num_k, counter);
      if (tile.group != p.groups.num_groups) tile.matrix = p.matrices.of(tile.group);
      if constexpr (P::kIsScaled) keep_for_care(s, tile, number);
    }
    hand_out(tile);
    if (tile.is_valid) continue;
    // Every block that had a tile draws one number too many; the last of these ends the count.
    const bool is_last = index == walk.total() + static_cast<int32_t>(gridDim.x) - 1;
    if (counter != nullptr && is_last && threadIdx.x % 32 == 0) *counter = 0;
    return;
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

// A warp's next tile; its place in the ring is given back. Where operands have scales, all lanes
// wait, read and give back, and no branch is one lane's alone: so the compiler knows that a warp is
// together, and that operands' descriptors, and whatever else follows from a tile, are the same in
// all of it. BF16's loops, which add nothing between their products, are no faster so.
template <class P>
__device__ WorkTile next_tile(SharedMemory<P>& s, Ring<P::kNumTiles>& ring) {
  WorkTile tile = {};
  if (P::kIsScaled || threadIdx.x % 32 == 0) {
    ring.wait_full(s.tile_full);
    if (P::kIsScaled) __syncwarp();
    tile = s.tiles[ring.stage];
    ptx::mbarrier_arrive(&s.tile_empty[ring.stage]);
  }
  ring.advance();
  return P::kIsScaled ? tile : from_leader(tile);
}

template <class P, class Operands>
__device__ void produce(SharedMemory<P>& s, const Operands& operands) {
  constexpr int kStepsToDraw = 4;  // in which the scheduler finds the next tile
  Ring<P::kNumTiles> tiles;
  StagesOf<P> ring;
  for (;; tiles.advance()) {
    tiles.wait_full(s.tile_full);
    const WorkTile tile = s.tiles[tiles.stage];
    if (!tile.is_valid) return;
    const int bytes = operands.template stage_bytes<P>(tile);
    const auto load = [&](int begin, int end) {
      for (int k = begin; k < end; ++k, ring.advance()) {
        ring.wait_empty(s.empty);
        ptx::mbarrier_arrive_expect_tx(&s.full[ring.stage], bytes);
        operands.template load<P>(s.stages[ring.stage], &s.full[ring.stage], tile, k * P::kTileK);
        if constexpr (P::kIsScaled) {
          operands.template load_scales<P>(s.scales[ring.stage], &s.full[ring.stage], tile, k);
        }
      }
    };
    const int near_end = max(tile.num_k - kStepsToDraw, 0);
    load(0, near_end);
    ptx::mbarrier_arrive(&s.tile_empty[tiles.stage]);
    load(near_end, tile.num_k);
    ring.end_tile();
  }
}

// This warp among the consumers', and its warpgroup, which is known to be uniform.
template <class P>
struct ConsumerWarp {
  int index = static_cast<int>(threadIdx.x) / 32 - 4;
  int warpgroup = __shfl_sync(~0u, index / P::kWarpsOfConsumer, 0);
};

template <class P, class Operands, class Epilogue>
__device__ void consume(SharedMemory<P>& s, const Operands& operands, const Epilogue& epilogue) {
  const auto [warp, consumer] = ConsumerWarp<P>();
  Ring<P::kNumTiles> tiles;
  StagesOf<P> ring;
  ScheduleOf<P> schedule(s, consumer);
  const int box = P::kWarpsOfBox == 1 ? warp : consumer;
  PiecesOf<P, Epilogue> pieces(
      epilogue, {s.buffers[box], s.buffer_full[box], consumer, warp % P::kWarpsOfBox});
  for (WorkTile tile = next_tile(s, tiles); tile.is_valid; tile = next_tile(s, tiles)) {
    if (!schedule.next_is_mine()) {
      if constexpr (P::kIsPingPong) ring.skip(tile.num_k);
      continue;
    }
    schedule.wait_for_turn();
    const int first_block = schedule.first_block();
    const int32_t rows = operands.rows_of_output(tile) - tile.first_m - first_block * 64;
    if (rows <= 0) {
      schedule.follow(ring, tile.num_k);
      continue;
    }
    const bool has_second = P::kRowBlocks == 2 && rows > 64;
    // Of the 16 rows in a block of 64 that are this warp's.
    const int32_t first_m =
        tile.first_m + first_block * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
    pieces.expect(tile, first_m);
    // Before the sums take their registers.
    if (ScheduleOf<P>::kLoadStep == 0 && tile.num_k > 0) pieces.start();
    Sums<P> sums = {};
    if (has_second) {
      multiply_tile<P::kRowBlocks, Operands>(s, schedule, ring, tile.num_k, sums, pieces);
    } else {
      multiply_tile<1, Operands>(s, schedule, ring, tile.num_k, sums, pieces);
    }
    pieces.prepare(first_m, sums[0]);
    if (has_second) pieces.prepare(first_m + 64, sums[P::kRowBlocks - 1]);
    pieces.take(sums[0]);
    if (has_second) {
      pieces.expect(tile, first_m + 64);
      if (tile.num_k > 0) pieces.start();
      pieces.take(sums[P::kRowBlocks - 1]);
    }
  }
  pieces.end();
}

// The same of operands with scales: what a tile's pieces leave is sent off in the next one's first
// step.
template <class P, class Operands, class Epilogue>
__device__ void consume_scaled(SharedMemory<P>& s, const Operands& operands,
                               const Epilogue& epilogue) {
  const auto [warp, consumer] = ConsumerWarp<P>();
  Ring<P::kNumTiles> tiles;
  StagesOf<P> ring;
  SideBySide<P> schedule(s, consumer);
  SentLater<P, Epilogue> pieces(epilogue, {s.buffers[warp], s.buffer_full[warp], consumer, 0});
  const auto send = [&] { pieces.send([&](const WorkTile& tile) { return is_stored(s, tile); }); };
  for (WorkTile tile = next_tile(s, tiles); tile.is_valid; tile = next_tile(s, tiles)) {
    if (operands.rows_of_output(tile) - tile.first_m <= consumer * 64) {
      send();
      schedule.follow(ring, tile.num_k);
      continue;
    }
    const int32_t first_m = tile.first_m + 16 * warp;
    float sums[P::kTileN / 2];
    const auto scales = operands.template scales<P>(tile, first_m);
    multiply_scaled_tile<Operands>(s, consumer, ring, tile, scales, sums, pieces, [&] {
      send();
      pieces.expect(tile, first_m);
    });
    pieces.prepare(first_m, sums);
    pieces.take(sums);
  }
  send();
  pieces.end();
}

// The same where an instruction's rows are columns of the tile, of which a warpgroup has 64
// (decoding_main_loop.cuh).
template <class P, class Operands, class Epilogue>
__device__ void consume_decoding(SharedMemory<P>& s, const Operands& operands,
                                 const Epilogue& epilogue) {
  const auto [warp, consumer] = ConsumerWarp<P>();
  Ring<P::kNumTiles> tiles;
  Ring<P::kNumStages> ring;
  SideBySide<P> schedule(s, consumer);
  StagingBuffers<P> buffers(s.buffers[consumer], s.buffer_full[consumer], consumer, warp % 4);
  for (WorkTile tile = next_tile(s, tiles); tile.is_valid; tile = next_tile(s, tiles)) {
    float sums[P::kTileM / 2] = {};
    auto weights = operands.template weights<P>(tile, consumer);
    const int32_t blocks = operands.template blocks<P>(tile);
    multiply_decoding(s, schedule, ring, tile.num_k, blocks, weights, sums);
    epilogue.take(buffers, tile, blocks, tile.first_n + 64 * consumer, sums);
  }
  buffers.finish();
}

template <class P, class Operands, class Epilogue>
__global__ void __launch_bounds__(P::kThreads, 1)
    grouped_gemm(const __grid_constant__ Parameters<Operands, Epilogue> p) {
  extern __shared__ char raw[];
  // By an offset from `raw`, so that the compiler knows whose memory it is: else loads are generic.
  auto& s = *reinterpret_cast<SharedMemory<P>*>(raw + -ptx::shared_address(raw) % 1024);
  if (threadIdx.x == 0) initialize_barriers(s);
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp >= 4) {
    ptx::setmaxnreg_inc<P::kConsumerRegisters>();
    if constexpr (P::kIsScaled) {
      consume_scaled<P>(s, p.operands, p.epilogue);
    } else if constexpr (P::kShape.decodes_weights) {
      consume_decoding<P>(s, p.operands, p.epilogue);
    } else {
      consume<P>(s, p.operands, p.epilogue);
    }
    return;
  }
  ptx::setmaxnreg_dec<P::kProducerRegisters>();
  if (warp == 0 && ptx::elect_one()) produce<P>(s, p.operands);
  if (warp == 1) schedule_tiles(s, p);
  if constexpr (P::kIsScaled) {
    if (warp == 3) examine(s, p.operands);
  }
  if (warp == 2 && blockIdx.x == 0) {
    check_groups(p.groups, p.reporter, static_cast<int>(threadIdx.x) % 32, 32);
  }
}

}  // namespace moire::cuda::sm90
