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
  constexpr int kRound = P::kNumStages;
  return num_k > kRound ? kRound : num_k == kRound ? 0 : num_k - 1;
}

// A stage of the ring that is known when the kernel is compiled, in a whole round or the last one.
template <int kStage, bool kIsInRound>
struct StageOfRing {
  static constexpr int kIndex = kStage;
  static constexpr bool kMayLoad = kStage == 0 || !kIsInRound;
};
// Calls step for the steps from k on, from stage kStage on, as far as they are below end.
template <bool kIsInRound, int kNumStages, int kStage = 0, class Step>
__device__ void run_stages(int k, int end, Step&& step) {
  if constexpr (kStage < kNumStages) {
    if (k + kStage >= end) return;
    step(StageOfRing<kStage, kIsInRound>(), k + kStage);
    run_stages<kIsInRound, kNumStages, kStage + 1>(k, end, step);
  }
}

// Sums of a tile whose scales are moderate.
//
// What a warp does between its last product of a step and its first of the next costs the tensor
// cores' time: so the loop is unrolled over the ring, whose places are then constants, and left
// between rounds alone, so that a step's additions and what the next begins with mix; the next
// stage is asked for ahead of the additions; and scales are read while products are under way.
template <class Operands, class P, class Scales, class Pieces>
__device__ void add_stages(SharedMemory<P>& s, const CodesInRing<P>& codes, StagesOf<P>& ring,
                           int num_k, Scales& scales, float (&sums)[P::kTileN / 2],
                           Pieces& pieces) {
  constexpr int kStages = P::kNumStages;
  const int when_to_load = load_step<P>(num_k);
  bool is_full = false;
  const auto step = [&](auto stage, int k) {
    constexpr int kStage = decltype(stage)::kIndex, kNext = (kStage + 1) % kStages;
    float products[P::kTileN / 2];
    if (!is_full) [[unlikely]]
      ptx::mbarrier_wait_parity(&s.full[kStage], ring.phase(kStage));
    if (decltype(stage)::kMayLoad && k == when_to_load) pieces.start();
    multiply_codes<Operands>(products, codes, kStage);
    scales.prepare(s.scales[kStage], kStage, k);
    ptx::wgmma_wait_group<0>();
    ptx::keep_behind(products);
    if (!Scales::kAreReadLate) give_back(s, kStage);
    ring.pass(kStage);
    is_full = ptx::mbarrier_test_wait_parity(&s.full[kNext], ring.phase(kNext));
    scales.add(s.scales[kStage], products, sums);
    if (Scales::kAreReadLate) give_back(s, kStage);
  };
  int k = 0;
#pragma unroll 1
  for (; k + kStages <= num_k; k += kStages) run_stages<true, kStages>(k, k + kStages, step);
  run_stages<false, kStages - 1>(k, num_k, step);
}

// The same whatever the scales are.
template <class Operands, class P, class Scales, class Pieces>
__device__ void add_stages_with_care(SharedMemory<P>& s, const CodesInRing<P>& codes,
                                     StagesOf<P>& ring, int num_k, Scales& scales,
                                     float (&sums)[P::kTileN / 2], Pieces& pieces) {
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

// All stages of a tile, as multiply_tile. Returns whether the sums are to be stored.
template <class Operands, class P, class Scales, class Pieces>
__device__ bool multiply_scaled_tile(SharedMemory<P>& s, int first_block, StagesOf<P>& ring,
                                     const WorkTile& tile, Scales scales,
                                     float (&sums)[P::kTileN / 2], Pieces& pieces) {
  const CodesInRing<P> codes(s, first_block);
  if (tile.care != Care::kNone) [[unlikely]] {
    add_stages_with_care<Operands>(s, codes, ring, tile.num_k, scales, sums, pieces);
    return tile.care == Care::kFull;
  }
  add_stages<Operands>(s, codes, ring, tile.num_k, scales, sums, pieces);
  return were_moderate(s, tile);
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
