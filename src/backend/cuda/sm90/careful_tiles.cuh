// Tiles whose scales need care. The product of two scales is a normal number wherever both are
// moderate (ScaleRange), as those of real tensors are, and is then one factor of a step's products.
// To ask for that ahead of every addition holds up the tensor cores. So the consumers sum a tile as
// if it were so, while another warp, the examiner, looks at the scales in its stages; before they
// send the sums off, in the next tile's first step, they look at what it found. Where a scale was
// not moderate they store nothing, and the scheduler hands the tile out again, behind all others,
// to be summed with two factors (ScaleFactors). Tiles that a block draws once it knows of one such
// are summed so at once.
//
// By then at most kNumTiles + 1 of its tiles may have to come again: the first that needs care, and
// those that were drawn before the examiner had gone on from it. One place more is kept
// (kExaminedTiles): a place's next tile is drawn when all warps have taken the second behind its
// last, and so are done with that.
#pragma once

#include "backend/cuda/sm90/shared_memory.cuh"

namespace moire::cuda::sm90 {

// Whether a tile's sums are to be stored: of an examined one where all scales were moderate, which
// is known soon behind its last stage.
template <class P>
__device__ bool is_stored(SharedMemory<P>& s, const WorkTile& tile) {
  if (tile.care != Care::kNone) return tile.care == Care::kFull;
  const int place = tile.number % P::kExaminedTiles;
  ptx::mbarrier_wait_parity(&s.examined.done[place], tile.number / P::kExaminedTiles & 1);
  return s.examined.need_care[place] == 0;
}
// By the examiner: what it found.
template <class P>
__device__ void set_moderate(SharedMemory<P>& s, const WorkTile& tile, bool are_moderate) {
  const int place = tile.number % P::kExaminedTiles;
  if (threadIdx.x % 32 != 0) return;
  if (!are_moderate) {
    s.examined.need_care[place] = 1;
    atomicExch(&s.examined.has_any, 1u);
  }
  ptx::mbarrier_arrive(&s.examined.done[place]);
}

// A tile as its block draws it, the `number`-th. By one lane of the scheduler.
template <class P>
__device__ void keep_for_care(SharedMemory<P>& s, WorkTile& tile, int32_t number) {
  tile.number = number;
  if (atomicOr(&s.examined.has_any, 0u) != 0) {
    tile.care = Care::kFull;
  } else {
    s.examined.tiles[number % P::kExaminedTiles] = tile;
  }
}
// Behind all that the block draws: those that need care. First come kNumTiles tiles of nothing:
// when the examiner takes the first of these, it has looked at all before.
template <class P, class HandOut>
__device__ void hand_out_again(SharedMemory<P>& s, HandOut hand_out) {
  const WorkTile nothing{.is_valid = 1, .care = Care::kNoSums};
  for (int i = 0; i < P::kNumTiles; ++i) hand_out(nothing);
  for (int i = 0; i < P::kExaminedTiles; ++i) {
    if (s.examined.need_care[i] == 0) continue;
    WorkTile tile = s.examined.tiles[i];
    tile.care = Care::kFull;
    hand_out(tile);
  }
}

}  // namespace moire::cuda::sm90
