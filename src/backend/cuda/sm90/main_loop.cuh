// A consumer warpgroup's main loop: wgmma over a tile's stages. Sums are in ascending K, 16 at a
// time, in every instance.
#pragma once

#include "backend/cuda/sm90/schedules.cuh"

namespace moire::cuda::sm90 {

// Sums of a warpgroup: 64 rows a block.
template <class P>
using Sums = float[P::kRowBlocks][P::kTileN / 2];

// Slices of 16 in K, of FP8 32.
template <class P>
inline constexpr int kSlices = P::kTileKBytes / 32;

// Issues the products of kNumSlices slices of a stage, for row blocks first_block ...
// first_block + kBlocks - 1 and all of the tile's columns, kWidth to an instruction.
template <int kWidth, int kNumSlices, int kBlocks, class Operands, class P>
__device__ void multiply(Sums<P>& sums, const Stage<P>& stage, int first_block) {
  // 64 rows of an operand are 8 KiB in either majorness, and lie one after another.
  constexpr uint32_t kPanelBytes = 64 * P::kTileK * 2;
  constexpr uint32_t kNextPanel = kPanelBytes >> 4;  // in a descriptor
  const uint32_t a = ptx::operand_descriptor(
      ptx::shared_address(stage.a + first_block * kPanelBytes), kPanelBytes);
  const uint32_t b = ptx::operand_descriptor(ptx::shared_address(stage.b), kPanelBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kNumSlices; ++i) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int part = 0; part < P::kTileN / kWidth; ++part) {
        ptx::wgmma_m64k16<kWidth, Operands::kA, Operands::kB>(
            reinterpret_cast<float(&)[kWidth / 2]>(sums[block][part * kWidth / 2]),
            a + i * ptx::kDescriptorStep<Operands::kA> + block * kNextPanel,
            b + i * ptx::kDescriptorStep<Operands::kB> + part * (kWidth / 64) * kNextPanel, 1);
      }
    }
  }
  ptx::wgmma_commit_group();
}

// All stages of a tile. `pieces` may start the epilogue's loads early on, and do a slice of work in
// every step, while its products are under way; the schedule is told when the last are. A stage is
// given back when its products are done.
template <int kBlocks, class Operands, class P, class Pieces>
__device__ void multiply_tile(SharedMemory<P>& s, ScheduleOf<P>& schedule,
                              Ring<P::kNumStages>& ring, int num_k, Sums<P>& sums, Pieces& pieces) {
  constexpr int kInFlight = ScheduleOf<P>::kInFlight, kLoadStep = ScheduleOf<P>::kLoadStep;
  const int load_step = min(kLoadStep, num_k - 1);
  [[maybe_unused]] int last = 0;
  for (int k = 0; k < num_k; ++k, ring.advance()) {
    const Stage<P>& stage = s.stages[ring.uniform_stage()];
    ring.wait_full(s.full);
    if (kLoadStep > 0 && k == load_step) pieces.start();
    multiply<P::kWidth, kSlices<P>, kBlocks, Operands>(sums, stage, schedule.first_block());
    pieces.advance();
    ptx::wgmma_wait_group<kInFlight>();
    if (kInFlight == 0) give_back(s, ring.stage);
    if (kInFlight == 1 && k > 0) give_back(s, last);
    if constexpr (kInFlight == 1) last = ring.stage;
  }
  schedule.pass_on();
  if (kInFlight == 1) {
    ptx::wgmma_wait_group<0>();
    if (num_k > 0) give_back(s, last);
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) ptx::keep_behind(sums[block]);
}

}  // namespace moire::cuda::sm90
