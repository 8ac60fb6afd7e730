// The main loop of FP8 operands with scales: 128 in K are summed by the tensor cores, codes alone,
// from zero; then they are added to FP32 sums with the scales of both operands.
#pragma once

#include "backend/cuda/sm90/main_loop.cuh"

namespace moire::cuda::sm90 {

// Where a warpgroup's rows and the tile's columns are in the ring's first stage, as descriptors
// that are known to be the same in all lanes: those of a stage are then sums of uniform registers.
template <class P>
struct CodesInRing {
  uint32_t a, b;

  __device__ CodesInRing(const SharedMemory<P>& s, int first_block)
      : a(uniform(s.stages[0].a + first_block * 64 * P::kTileKBytes)), b(uniform(s.stages[0].b)) {}

 private:
  static __device__ uint32_t uniform(const char* codes) {
    return __shfl_sync(~0u, ptx::operand_descriptor(ptx::shared_address(codes)), 0);
  }
};

// Sums of the codes of a stage, for a warpgroup's rows and all of the tile's columns: two groups,
// of which the second is the last slice.
template <class Operands, class P>
__device__ void multiply_codes(float (&products)[P::kTileN / 2], const CodesInRing<P>& codes,
                               int stage) {
  constexpr uint32_t kStep = ptx::kDescriptorStep<ptx::Major::kK>;
  const uint32_t in_ring = stage * (sizeof(Stage<P>) >> 4);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSlices<P>; ++i) {
    if (i + 1 == kSlices<P>) ptx::wgmma_commit_group();
    ptx::wgmma_m64k32<P::kTileN, Operands::kIsE5M2A, Operands::kIsE5M2B>(
        products, codes.a + in_ring + i * kStep, codes.b + in_ring + i * kStep, i > 0);
  }
  ptx::wgmma_commit_group();
}

// Whether all are 0 or from 2^-62 to below 2^62, in all of a warp's lanes: products of two are 0 or
// normal numbers, then. No negative one is.
template <int kCount>
__device__ bool all_moderate(const float (&scales)[kCount]) {
  uint32_t least = ~0u, most = 0;  // one less than the least, of which 0 comes last
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t bits = __float_as_uint(scales[i]);
    least = min(least, bits - 1);
    most = max(most, bits);
  }
  const bool all = least >= (uint32_t{127 - 62} << 23) - 1 && most < uint32_t{127 + 62} << 23;
  return __all_sync(~0u, all);
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
// adds while another multiplies; a turn is passed on ahead of the first step's last slice.
//
// What a warp does between its last product of a step and its first of the next costs the tensor
// cores' time: so the loop is unrolled over the ring, whose places are then constants; the next
// stage is asked for ahead of the additions; and scales are read while products are under way.
template <class Operands, class P, class Scales, class Pieces>
__device__ void multiply_scaled_tile(SharedMemory<P>& s, ScheduleOf<P>& schedule, StagesOf<P>& ring,
                                     int num_k, Scales scales, float (&sums)[P::kTileN / 2],
                                     Pieces& pieces) {
  constexpr int kLoadStep = ScheduleOf<P>::kLoadStep, kStages = P::kNumStages;
  const int load_step = min(kLoadStep, num_k - 1);
  if (num_k == 0) {
    schedule.pass_on();
    return;
  }
  const CodesInRing<P> codes(s, schedule.first_block());
  scales.begin();
  bool is_full = false;
#pragma unroll 1
  for (int round = 0; round < num_k; round += kStages) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const int k = round + stage;
      if (stage > 0 && k == num_k) break;
      float products[P::kTileN / 2];
      if (!is_full) [[unlikely]]
        ptx::mbarrier_wait_parity(&s.full[stage], ring.phase(stage));
      if (kLoadStep > 0 && k == load_step) pieces.start();
      multiply_codes<Operands>(products, codes, stage);
      scales.prepare(s.scales[stage], stage, k + 1 < num_k);
      if (k == 0) {
        ptx::wgmma_wait_group<1>();
        schedule.pass_on();
      }
      ptx::wgmma_wait_group<0>();
      ptx::keep_behind(products);
      if (!Scales::kAreReadLate) give_back(s, stage);
      ring.pass(stage);
      const int next = (stage + 1) % kStages;
      is_full = ptx::mbarrier_test_wait_parity(&s.full[next], ring.phase(next));
      scales.add(s.scales[stage], stage, products, sums);
      if (Scales::kAreReadLate) give_back(s, stage);
    }
    scales.next_round();
  }
}

}  // namespace moire::cuda::sm90
