// The main loop of BF16 rows beside MXFP8 weights: an instruction's first operand is the weights,
// decoded on their way from shared memory to registers, its second the rows. So of a tile the
// instruction has 64 columns and all rows, and an element is decoded once for all rows of a tile.
// Sums are in ascending K, 16 at a time, as everywhere.
#pragma once

#include "backend/cuda/sm90/schedules.cuh"

namespace moire::cuda::sm90 {

// All stages of a tile, for a warpgroup's 64 columns and kRows rows. Warpgroups begin a tile one
// after the other, so that one decodes while another multiplies. Of two, each besides decodes a
// stage while the products of its last are under way, into registers of its own; of three, who have
// fewer registers, two multiply meanwhile.
template <int kRows, class P, class Weights>
__device__ __forceinline__ void multiply_decoding(SharedMemory<P>& s, SideBySide<P>& schedule,
                                                  Ring<P::kNumStages>& ring, int num_k,
                                                  Weights& weights, float (&sums)[P::kTileM / 2]) {
  constexpr int kSlices = P::kTileK / 16;
  constexpr bool kIsAhead = P::kConsumers == 2;
  uint32_t decoded[2][kSlices][4];  // of even stages, and of odd ones
  const auto decode = [&](int k, uint32_t(&slices)[kSlices][4]) {
    ring.wait_full(s.full);
    weights.begin(s.stages[ring.uniform_stage()].b, k);
#pragma unroll
    for (int i = 0; i < kSlices; ++i) weights.decode(i, slices[i]);
  };
  if (kIsAhead && num_k > 0) decode(0, decoded[0]);
  schedule.wait_for_turn();
  if (num_k == 0) schedule.pass_on();
#pragma unroll 1
  for (int pair = 0; pair < num_k; pair += 2) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int k = pair + odd;
      if (odd == 1 && k == num_k) break;
      uint32_t(&slices)[kSlices][4] = decoded[kIsAhead ? odd : 0];
      if (!kIsAhead) decode(k, slices);
      const char* const first_row = s.stages[ring.uniform_stage()].a;
      const uint32_t rows = ptx::operand_descriptor(ptx::shared_address(first_row));
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        if (i + 1 == kSlices) ptx::wgmma_commit_group();
        ptx::wgmma_m64k16<kRows>(reinterpret_cast<float(&)[kRows / 2]>(sums), slices[i],
                                 rows + i * ptx::kDescriptorStep<ptx::Major::kK>);
      }
      ptx::wgmma_commit_group();
      const int stage = ring.stage;
      ring.advance();
      if (k == 0) {
        ptx::wgmma_wait_group<1>();
        schedule.pass_on();
      }
      if (kIsAhead && k + 1 < num_k) decode(k + 1, decoded[1 - odd]);
      ptx::wgmma_wait_group<0>();
      give_back(s, stage);
    }
  }
  ptx::keep_behind(sums);
}

// Of as many rows as there are blocks of 64.
template <class P, class Weights>
__device__ __forceinline__ void multiply_decoding(SharedMemory<P>& s, SideBySide<P>& schedule,
                                                  Ring<P::kNumStages>& ring, int num_k, int blocks,
                                                  Weights& weights, float (&sums)[P::kTileM / 2]) {
  const auto multiply = [&]<int kRows>() {
    multiply_decoding<kRows>(s, schedule, ring, num_k, weights, sums);
  };
  if constexpr (P::kTileM == 256) {
    if (blocks > 3) return multiply.template operator()<256>();
  }
  if constexpr (P::kTileM >= 192) {
    if (blocks > 2) return multiply.template operator()<192>();
  }
  if (blocks > 1) return multiply.template operator()<128>();
  multiply.template operator()<64>();
}

}  // namespace moire::cuda::sm90
