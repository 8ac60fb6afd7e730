// An epilogue as numbered pieces, and who runs them.
//
// A piece is what becomes of the sums of one or two buffers' columns, in the 16 rows that are a
// warp's. An epilogue says what is done:
//   part(tile, first_m)               a Part: what it knows of a tile's 16 rows from first_m on
//   prepare(part, sums)               what all pieces need first: a bias, or sums rounded, for they
//                                     then take half the registers
//   num_pieces<P>(part)               pieces whose columns exist, of kPieces<P> in a tile
//   loads<P>(part, i)                 whether piece i is loaded, where kLoads: of the first kAhead
//                                     all or none; others may be exempt
//   load(buffers, part, i)            by the leader, if so: asks for what piece i reads, on the
//                                     barrier of buffer load_buffer(i)
//   stage(buffers, part, i, sums)     the sums of piece i into staging buffers, rounded
//   compute(buffers, part, i, slice)  slice of kNumSlices (or 0) of them, in the buffers
//   store(buffers, part, i)           by the leader: sends the buffers off
//   store_staged(buffers, part, i)    the same of what was staged; where kStagesAll, with which all
//                                     pieces are staged before the first is computed
//   read_back(buffers, part, i)       where kReadsBack: what is read of all warps' rows in buffers
//                                     that were sent off
//   finish(part, i)                   what a piece leaves in registers
// A driver says when. AtOnce: behind the tile's products; under ping-pong, while the other
// warpgroup multiplies. LeftOver: sums are staged behind the products, and the rest is done slice
// by slice in the next main loop, while that one's products are under way. SentLater: sums are
// staged behind the products, and sent off in the next main loop's first step.
// An epilogue that loads names its buffers, and a driver sees to it that they are free; one that
// does not acquires them in turn when it stages.
#pragma once

#include <type_traits>

#include "backend/cuda/device/tile_walk.cuh"
#include "backend/cuda/sm90/staging_buffers.cuh"

namespace moire::cuda::sm90 {

// All pieces of the rows into buffers.
template <class P, class Epilogue, int kSums>
__device__ void stage_pieces(const Epilogue& epilogue, StagingBuffers<P>& buffers,
                             const typename Epilogue::Part& part, float (&sums)[kSums]) {
  buffers.template wait_stored<0>();
  const int num_pieces = epilogue.template num_pieces<P>(part);
#pragma unroll
  for (int i = 0; i < Epilogue::template kPieces<P>; ++i) {
    if (i < num_pieces) epilogue.stage(buffers, part, i, sums);
  }
}
// And off as they are.
template <class P, class Epilogue, int kSums>
__device__ void stage_all(const Epilogue& epilogue, StagingBuffers<P>& buffers,
                          const typename Epilogue::Part& part, float (&sums)[kSums]) {
  stage_pieces(epilogue, buffers, part, sums);
  buffers.release([&] {
    for (int i = 0; i < epilogue.template num_pieces<P>(part); ++i) {
      epilogue.store_staged(buffers, part, i);
    }
  });
}
// Asks for what the first pieces of the rows read, as many as are loaded ahead.
template <class P, class Epilogue>
__device__ void load_first(const Epilogue& epilogue, const StagingBuffers<P>& buffers,
                           const typename Epilogue::Part& part) {
  constexpr int kPieces = Epilogue::template kPieces<P>, kAhead = Epilogue::template kAhead<P>;
  if (!epilogue.template loads<P>(part, 0)) return;
  buffers.by_leader([&] {
    ptx::bulk_wait_group_read<0>();
#pragma unroll
    for (int i = 0; i < min(kAhead, kPieces); ++i) {
      if (i < epilogue.template num_pieces<P>(part)) epilogue.load(buffers, part, i);
    }
  });
}

template <class P, class Epilogue>
class AtOnce {
 public:
  using Buffers = StagingBuffers<P>;
  __device__ AtOnce(const Epilogue& epilogue, const Buffers& buffers)
      : epilogue_(epilogue), buffers_(buffers) {}

  // The rows whose products come next.
  __device__ void expect(const WorkTile& tile, int32_t first_m) {
    tile_ = tile;
    first_m_ = first_m;
  }
  // Early in their main loop: the loads of the first pieces.
  __device__ void start() {
    if constexpr (Epilogue::kLoads) {
      load_first(epilogue_, buffers_, epilogue_.part(tile_, first_m_));
    }
  }
  // In every step of a main loop, while its products are under way.
  __device__ void advance() {}

  // The products of the rows from first_m on are done. All of a warp's rows are prepared before any
  // are taken.
  template <int kSums>
  __device__ void prepare(int32_t first_m, float (&sums)[kSums]) const {
    epilogue_.prepare(epilogue_.part(tile_, first_m), sums);
  }
  // Those of the rows that were expected.
  template <int kSums>
  __device__ void take(float (&sums)[kSums]) {
    auto part = epilogue_.part(tile_, first_m_);
    if (!epilogue_.writes(part)) return;
    if constexpr (Epilogue::kStagesAll) stage_all(epilogue_, buffers_, part, sums);
#pragma unroll Epilogue::kUnrolled
    for (int i = 0; i < kPieces; ++i) {
      if (i >= epilogue_.template num_pieces<P>(part)) break;
      if constexpr (Epilogue::kLoads) wait_free(part, i);
      if constexpr (!Epilogue::kStagesAll) epilogue_.stage(buffers_, part, i, sums);
      if constexpr (Epilogue::kNumSlices > 0) compute(part, i);
      buffers_.release([&] { epilogue_.store(buffers_, part, i); });
      if constexpr (Epilogue::kReadsBack) {
        epilogue_.read_back(buffers_, part, i);
        buffers_.join();  // the leader loads nothing into buffers that others still read
      }
      if constexpr (Epilogue::kLoads) load_later(part, i);
      epilogue_.finish(part, i);
    }
  }
  // After the last tile.
  __device__ void end() { buffers_.finish(); }

 private:
  static constexpr int kPieces = Epilogue::template kPieces<P>;
  // Pieces that have buffers at a time, where they are loaded.
  static constexpr int kAhead = Epilogue::template kAhead<P>;

  template <class Part>
  __device__ void wait_free(const Part& part, int i) {
    // The leader has waited before it loaded, but for itself alone.
    if (i == 0) buffers_.template wait_stored<0>();
    if constexpr (kPieces > kAhead) {
      if (i < kAhead || epilogue_.template loads<P>(part, i)) return;
      buffers_.template wait_stored<kAhead - 1>();
    }
  }
  template <class Part>
  __device__ void compute(Part& part, int i) {
    if constexpr (Epilogue::kLoads) {
      if (epilogue_.template loads<P>(part, i)) {
        buffers_.wait_full(epilogue_.load_buffer(buffers_, i));
      }
    }
#pragma unroll 1
    for (int slice = 0; slice < Epilogue::kNumSlices; ++slice) {
      epilogue_.compute(buffers_, part, i, slice);
    }
  }
  // Piece i is on its way out. The next load goes where the piece before it was, which has left
  // its buffers or will soon; or, where there is room for one piece only, in its own place.
  template <class Part>
  __device__ void load_later(const Part& part, int i) {
    if constexpr (kPieces <= kAhead) return;
    constexpr int kBehind = kAhead == 1 ? 0 : 1;
    const int later = i - kBehind + kAhead;
    if (i < kBehind || !epilogue_.template loads<P>(part, later)) return;
    if (later >= epilogue_.template num_pieces<P>(part)) return;
    buffers_.by_leader([&] {
      ptx::bulk_wait_group_read<kBehind>();
      epilogue_.load(buffers_, part, later);
    });
  }

  const Epilogue& epilogue_;
  Buffers buffers_;
  WorkTile tile_;
  int32_t first_m_;
};

// What is left over must not load: a load's latency would have to pass within a few steps.
template <class P, class Epilogue>
class LeftOver {
  static_assert(!Epilogue::kLoads);

 public:
  using Buffers = StagingBuffers<P>;
  __device__ LeftOver(const Epilogue& epilogue, const Buffers& buffers)
      : epilogue_(epilogue), buffers_(buffers) {}

  __device__ void expect(const WorkTile& tile, int32_t first_m) {
    tile_ = tile;
    first_m_ = first_m;
  }
  __device__ void start() {}

  // A slice of what is left.
  __device__ void advance() {
    if (is_any()) step();
  }

  template <int kSums>
  __device__ void prepare(int32_t first_m, float (&sums)[kSums]) const {
    epilogue_.prepare(epilogue_.part(tile_, first_m), sums);
  }
  template <int kSums>
  __device__ void take(float (&sums)[kSums]) {
    while (is_any()) step();
    left_ = epilogue_.part(tile_, first_m_);
    stage_all(epilogue_, buffers_, left_, sums);
    next_ = 0;
    end_ = Epilogue::kNumSlices * epilogue_.template num_pieces<P>(left_);
  }
  __device__ void end() {
    while (is_any()) step();
    buffers_.finish();
  }

 private:
  __device__ bool is_any() const { return next_ < end_; }

  // The next slice.
  __device__ void step() {
    const int i = next_ / Epilogue::kNumSlices, slice = next_ % Epilogue::kNumSlices;
    epilogue_.compute(buffers_, left_, i, slice);
    if (++next_ % Epilogue::kNumSlices != 0) return;
    buffers_.release([&] { epilogue_.store(buffers_, left_, i); });
    epilogue_.finish(left_, i);
  }

  const Epilogue& epilogue_;
  Buffers buffers_;
  WorkTile tile_;
  int32_t first_m_;
  int next_ = 0, end_ = 0;  // slices of `left_`
  typename Epilogue::Part left_;
};

// There is a buffer for every piece.
template <class P, class Epilogue>
class SentLater {
 public:
  using Buffers = StagingBuffers<P>;
  __device__ SentLater(const Epilogue& epilogue, const Buffers& buffers)
      : epilogue_(epilogue), buffers_(buffers) {}

  // Of what the tile before left nothing is staged any more.
  __device__ void expect(const WorkTile& tile, int32_t first_m) {
    tile_ = tile;
    first_m_ = first_m;
  }
  __device__ void start() {
    if constexpr (Epilogue::kLoads) {
      load_first(epilogue_, buffers_, epilogue_.part(tile_, first_m_));
    }
  }
  template <int kSums>
  __device__ void take(float (&sums)[kSums]) {
    auto part = epilogue_.part(tile_, first_m_);
    if (!epilogue_.writes(part)) return;
    epilogue_.prepare(part, sums);
    stage_pieces(epilogue_, buffers_, part, sums);
    is_staged_ = true;
  }
  // Sends off what is staged, unless its tile is not to be stored, which `stores` says.
  template <class F>
  __device__ void send(F&& stores) {
    if (!is_staged_) return;
    is_staged_ = false;
    const auto part = epilogue_.part(tile_, first_m_);
    const bool is_stored = stores(tile_);
    buffers_.release([&] {
      if (!is_stored) return;
#pragma unroll
      for (int i = 0; i < Epilogue::template kPieces<P>; ++i) {
        if (i < epilogue_.template num_pieces<P>(part)) epilogue_.store(buffers_, part, i);
      }
    });
  }
  __device__ void end() { buffers_.finish(); }

 private:
  const Epilogue& epilogue_;
  Buffers buffers_;
  WorkTile tile_;
  int32_t first_m_;
  bool is_staged_ = false;
};

template <class P, class Epilogue>
using PiecesOf = std::conditional_t<P::kIsLeftOver, LeftOver<P, Epilogue>, AtOnce<P, Epilogue>>;

}  // namespace moire::cuda::sm90
