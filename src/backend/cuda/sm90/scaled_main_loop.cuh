// The main loop of FP8 operands with scales: 128 in K are summed by the tensor cores, codes alone,
// from zero; then they are added to FP32 sums with the scales of both operands.
#pragma once

#include <type_traits>

#include "backend/cuda/sm90/careful_tiles.cuh"
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

// Sums of the codes of a stage, for a warpgroup's rows and all of the tile's columns.
template <class Operands, class P>
__device__ void multiply_codes(float (&products)[P::kTileN / 2], const CodesInRing<P>& codes,
                               int stage) {
  constexpr uint32_t kStep = ptx::kDescriptorStep<ptx::Major::kK>;
  const uint32_t in_ring = stage * (sizeof(Stage<P>) >> 4);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSlices<P>; ++i) {
    ptx::wgmma_m64k32<P::kTileN, Operands::kIsE5M2A, Operands::kIsE5M2B>(
        products, codes.a + in_ring + i * kStep, codes.b + in_ring + i * kStep, i > 0);
  }
  ptx::wgmma_commit_group();
}

// The least and the largest of scales, none of them negative.
class ScaleRange {
 public:
  __device__ void take(float scale) {
    const uint32_t bits = __float_as_uint(scale);
    least_ = min(least_, bits - 1);
    most_ = max(most_, bits);
  }
  // Whether all are 0 or from 2^-62 to below 2^62, in all of a warp's lanes: products of two are 0
  // or normal numbers, then.
  __device__ bool are_moderate() const {
    const bool are = least_ >= (uint32_t{127 - 62} << 23) - 1 && most_ < uint32_t{127 + 62} << 23;
    return __all_sync(~0u, are);
  }

 private:
  uint32_t least_ = ~0u, most_ = 0;  // one less than the least, of which 0 comes last
};

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

// In which step a tile's epilogue starts to load. In whole rounds it is one of the first stage,
// which alone has the code for it; in shorter tiles the last.
template <class P>
__device__ int load_step(int num_k) {
  return min(num_k - 1, P::kNumStages);
}

// Where in a tile a step is, of a stage that is known when the kernel is compiled.
enum class Place { kFirst, kInRound, kInLastRound };
template <int kStage, Place kPlace>
struct StepOfTile {
  static constexpr int kIndex = kStage;
  static constexpr bool kIsFirst = kPlace == Place::kFirst;
  static constexpr bool kMayLoad = kStage == 0 || kPlace != Place::kInRound;
};
// Calls step for the steps from k on, of stage 1, and on through the ring, as far as they are below
// end; kCount at most.
template <Place kPlace, int kNumStages, int kCount, int kDone = 0, class Step>
__device__ void run_stages(int k, int end, Step&& step) {
  if constexpr (kDone < kCount) {
    if (k + kDone >= end) return;
    step(StepOfTile<(1 + kDone) % kNumStages, kPlace>(), k + kDone);
    run_stages<kPlace, kNumStages, kCount, kDone + 1>(k, end, step);
  }
}

// Sums of a tile whose scales are moderate.
//
// What a warp does between its last product of a step and its first of the next costs the tensor
// cores' time: so the loop is unrolled over the ring, whose places are then constants, and left
// between rounds alone where registers allow that a step's additions and what the next begins with
// mix; the next stage is asked for ahead of the additions; and scales are read while products are
// under way. So is what the last tile left sent off, by `begin`: in the first step, which is
// outside of the rounds, no sums take registers yet.
template <class Operands, class P, class Scales, class Pieces, class Begin>
__device__ void add_stages(SharedMemory<P>& s, const CodesInRing<P>& codes, StagesOf<P>& ring,
                           int num_k, Scales& scales, float (&sums)[P::kTileN / 2], Pieces& pieces,
                           Begin&& begin) {
  constexpr int kStages = P::kNumStages;
  const int when_to_load = load_step<P>(num_k);
  bool is_full = false;
  const auto step = [&](auto stage, int k) {
    constexpr int kStage = decltype(stage)::kIndex, kNext = (kStage + 1) % kStages;
    constexpr bool kIsFirst = decltype(stage)::kIsFirst;
    float products[P::kTileN / 2];
    if (!is_full) [[unlikely]]
      ptx::mbarrier_wait_parity(&s.full[kStage], ring.phase(kStage));
    multiply_codes<Operands>(products, codes, kStage);
    if constexpr (kIsFirst) begin();
    if (decltype(stage)::kMayLoad && k == when_to_load) pieces.start();
    scales.prepare(s.scales[kStage], kStage, k);
    ptx::wgmma_wait_group<0>();
    ptx::keep_behind(products);
    if (!Scales::kAreReadLate) give_back(s, kStage);
    ring.pass(kStage);
    is_full = ptx::mbarrier_test_wait_parity(&s.full[kNext], ring.phase(kNext));
    scales.template add<kIsFirst>(s.scales[kStage], products, sums);
    if (Scales::kAreReadLate) give_back(s, kStage);
  };
  step(StepOfTile<0, Place::kFirst>(), 0);
  int k = 1;
#pragma unroll 1
  for (; k + kStages <= num_k; k += kStages) {
    // Weight gradients spill where steps of a round may mix: they ask before each.
    const int end = P::kShape.scales_every_column ? num_k : k + kStages;
    run_stages<Place::kInRound, kStages, kStages>(k, end, step);
  }
  run_stages<Place::kInLastRound, kStages, kStages - 1>(k, num_k, step);
}

// The same whatever the scales are.
template <class Operands, class P, class Scales, class Pieces>
__device__ void add_stages_with_care(SharedMemory<P>& s, const CodesInRing<P>& codes,
                                     StagesOf<P>& ring, int num_k, Scales& scales,
                                     float (&sums)[P::kTileN / 2], Pieces& pieces) {
#pragma unroll
  for (float& sum : sums) sum = 0;
#pragma unroll 1
  for (int k = 0; k < num_k; ++k, ring.advance()) {
    float products[P::kTileN / 2];
    ring.wait_full(s.full);
    if (k == load_step<P>(num_k)) pieces.start();
    multiply_codes<Operands>(products, codes, ring.stage);
    scales.prepare(s.scales[ring.stage], ring.stage, k);
    ptx::wgmma_wait_group<0>();
    ptx::keep_behind(products);
    scales.add_with_care(s.scales[ring.stage], products, sums);
    give_back(s, ring.stage);
  }
  ring.end_tile();
}

// All stages of a tile, as multiply_tile; `begin` is called ahead of all else that concerns its
// pieces.
template <class Operands, class P, class Scales, class Pieces, class Begin>
__device__ void multiply_scaled_tile(SharedMemory<P>& s, int first_block, StagesOf<P>& ring,
                                     const WorkTile& tile, Scales scales,
                                     float (&sums)[P::kTileN / 2], Pieces& pieces, Begin&& begin) {
  const CodesInRing<P> codes(s, first_block);
  if (tile.care != Care::kNone || tile.num_k == 0) [[unlikely]] {
    begin();
    return add_stages_with_care<Operands>(s, codes, ring, tile.num_k, scales, sums, pieces);
  }
  add_stages<Operands>(s, codes, ring, tile.num_k, scales, sums, pieces, begin);
}

// The examiner: looks at the scales of all stages, and gives them back like a consumer.
template <class P, class Operands>
__device__ void examine(SharedMemory<P>& s, const Operands& operands) {
  Ring<P::kNumTiles> tiles;
  StagesOf<P> ring;
  for (WorkTile tile = next_tile(s, tiles); tile.is_valid; tile = next_tile(s, tiles)) {
    auto scales = operands.template examined_scales<P>(tile);
    for (int k = 0; k < tile.num_k; ++k, ring.advance()) {
      ring.wait_full(s.full);
      scales.take(s.scales[ring.stage], k);
      give_back(s, ring.stage);
    }
    ring.end_tile();
    if (tile.care == Care::kNone) set_moderate(s, tile, scales.all().are_moderate());
  }
}

}  // namespace moire::cuda::sm90
