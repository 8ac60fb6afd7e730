// What the roles of one block share: the ring of stages, the consumers' staging buffers, the ring
// of work tiles, and the barriers of all three.
#pragma once

#include "backend/cuda/device/tile_walk.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"

namespace moire::cuda::sm90 {

// What a stage holds, 128 bytes of each row in K.
template <class P>
struct Stage {
  alignas(1024) char a[P::kABytes];
  alignas(1024) char b[P::kBBytes];
};

// Scales that come with a stage: of the tile's rows, then of its columns if each has its own.
template <int kNumScales>
struct StageScales {
  alignas(128) float values[kNumScales];
};
template <>
struct StageScales<0> {};

// What is known of the scales of a block's last kCount tiles (careful_tiles.cuh).
template <int kCount>
struct ExaminedTiles {
  uint64_t done[kCount];  // barriers
  WorkTile tiles[kCount];
  uint32_t need_care[kCount];
  uint32_t has_any;  // that needed care
};
template <>
struct ExaminedTiles<0> {};

template <class P>
struct SharedMemory {
  Stage<P> stages[P::kNumStages];
  alignas(1024) char buffers[P::kBoxes][P::kNumBuffers][P::kBufferBytes];
  StageScales<P::kScales> scales[P::kNumStages];
  WorkTile tiles[P::kNumTiles];
  uint64_t full[P::kNumStages], empty[P::kNumStages];
  uint64_t tile_full[P::kNumTiles], tile_empty[P::kNumTiles];
  uint64_t buffer_full[P::kBoxes][P::kNumBuffers];
  uint64_t turn[P::kConsumers];
  ExaminedTiles<P::kExaminedTiles> examined;
};

// Dynamic shared memory starts at 16 bytes' alignment only.
template <class P>
inline constexpr size_t kSharedBytes = sizeof(SharedMemory<P>) + 1024 - 16;

template <class P>
__device__ void initialize_barriers(SharedMemory<P>& s) {
  for (int i = 0; i < P::kNumStages; ++i) {
    ptx::mbarrier_init(&s.full[i], 1);
    ptx::mbarrier_init(&s.empty[i],
                       P::kReturns * (P::kIsPingPong ? 1 : P::kConsumers) + P::kExaminers);
  }
  for (int i = 0; i < P::kNumTiles; ++i) {
    ptx::mbarrier_init(&s.tile_full[i], 1);
    ptx::mbarrier_init(&s.tile_empty[i], 1 + P::kTakersOfTile);
  }
  for (auto& box : s.buffer_full) {
    for (uint64_t& barrier : box) ptx::mbarrier_init(&barrier, 1);
  }
  for (uint64_t& turn : s.turn) ptx::mbarrier_init(&turn, P::kWarpsOfConsumer);
  if constexpr (P::kIsScaled) {
    for (uint32_t& needs : s.examined.need_care) needs = 0;
    s.examined.has_any = 0;
    for (uint64_t& done : s.examined.done) ptx::mbarrier_init(&done, 1);
  }
  ptx::fence_mbarrier_init();
}

}  // namespace moire::cuda::sm90
