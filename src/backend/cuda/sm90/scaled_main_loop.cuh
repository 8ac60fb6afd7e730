// The main loop of FP8 operands with scales: 128 in K are summed by the tensor cores, codes alone,
// from zero; then they are added to FP32 sums with the scales of both operands.
#pragma once

#include <cstdint>

#include "backend/cuda/sm90/main_loop.cuh"

namespace moire::cuda::sm90 {

// Sums of the codes of a stage, for one row block and all of the tile's columns: two groups, of
// which the second is the last slice.
template <class Operands, class P>
__device__ void multiply_codes(float (&products)[P::kTileN / 2], const Stage<P>& stage, int block) {
  const uint32_t a =
      ptx::operand_descriptor(ptx::shared_address(stage.a + block * 64 * P::kTileKBytes));
  const uint32_t b = ptx::operand_descriptor(ptx::shared_address(stage.b));
  constexpr uint32_t kStep = ptx::kDescriptorStep<ptx::Major::kK>;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSlices<P>; ++i) {
    if (i + 1 == kSlices<P>) ptx::wgmma_commit_group();
    ptx::wgmma_m64k32<P::kTileN, Operands::kIsE5M2A, Operands::kIsE5M2B>(products, a + i * kStep,
                                                                         b + i * kStep, i > 0);
  }
  ptx::wgmma_commit_group();
}

__device__ inline bool is_normal(float x) {
  return 2 * __float_as_uint(x) - 0x01000000u < 0xFE000000u;
}

// The two factors of a product of codes, one after the other: 1 and the product of the scales,
// rounded, where that is a normal number. Where it is not, the smaller scale comes first, so that
// nothing overflows or is lost on the way to a result that would not be.
struct ScaleFactors {
  float first, second;
  __device__ ScaleFactors(float a, float b) : first(1), second(a * b) {
    if (is_normal(second)) return;
    first = fabsf(a) < fabsf(b) ? a : b;
    second = fabsf(a) < fabsf(b) ? b : a;
  }
};

// All stages of a tile, as multiply_tile. Warpgroups begin a tile one after the other, so that one
// adds while another multiplies; a turn is passed on ahead of the first step's last slice. `scales`
// are asked for those of a step when the last step has been added, and add it up.
template <int kBlocks, class Operands, class P, class Scales, class Pieces>
__device__ void multiply_scaled_tile(SharedMemory<P>& s, ScheduleOf<P>& schedule,
                                     Ring<P::kNumStages>& ring, int num_k, Scales scales,
                                     Sums<P>& sums, Pieces& pieces) {
  constexpr int kLoadStep = ScheduleOf<P>::kLoadStep;
  const int load_step = min(kLoadStep, num_k - 1);
  if (num_k > 0) scales.load();
  if (num_k == 0) schedule.pass_on();
  for (int k = 0; k < num_k; ++k, ring.advance()) {
    ring.wait_full(s.full);
    if (kLoadStep > 0 && k == load_step) pieces.start();
    const Stage<P>& stage = s.stages[ring.stage];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float products[P::kTileN / 2];
      multiply_codes<Operands>(products, stage, schedule.first_block() + block);
      scales.prepare(block, stage);
      ptx::wgmma_wait_group<1>();
      if (k == 0 && block == 0) schedule.pass_on();
      ptx::wgmma_wait_group<0>();
      ptx::keep_behind(products);
      // A stage with scales is given back when they have been read, too.
      if (P::kColumnScales == 0 && block + 1 == kBlocks) give_back(s, ring.stage);
      scales.add(block, stage, products, sums[block]);
    }
    if (P::kColumnScales != 0) give_back(s, ring.stage);
    if (k + 1 < num_k) scales.load();
  }
}

}  // namespace moire::cuda::sm90
