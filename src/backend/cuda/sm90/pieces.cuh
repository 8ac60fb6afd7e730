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
// An epilogue that loads, or is sent later, names its buffers, and a driver sees to it that they
// are free; another acquires them in turn when it stages.
#pragma once

#include <type_traits>

#include "backend/cuda/device/tile_walk.cuh"
#include "backend/cuda/sm90/staging_buffers.cuh"

namespace moire::cuda::sm90 {

// What all drivers share: the rows whose products, and then pieces, come next.
template <class P, class Epilogue>
class PiecesOfRows {
 public:
  using Buffers = StagingBuffers<P>;
  __device__ PiecesOfRows(const Epilogue& epilogue, const Buffers& buffers)
      : epilogue_(epilogue), buffers_(buffers) {}

  // The rows whose products come next.
  __device__ void expect(const WorkTile& tile, int32_t first_m) {
    tile_ = tile;
    first_m_ = first_m;
  }
  // Early in their main loop: the loads of the first pieces.
  __device__ void start() {
    if constexpr (Epilogue::kLoads) {
      const auto part = this->part();
      if (!epilogue_.template loads<P>(part, 0)) return;
      buffers_.by_leader([&] {
        ptx::bulk_wait_group_read<0>();
#pragma unroll
        for (int i = 0; i < min(Epilogue::template kAhead<P>, kPieces); ++i) {
          if (i < epilogue_.template num_pieces<P>(part)) epilogue_.load(buffers_, part, i);
        }
      });
    }
  }
  // The products of the rows from first_m on are done. All of a warp's rows are prepared before any
  // are taken.
  template <int kSums>
  __device__ void prepare(int32_t first_m, float (&sums)[kSums]) const {
    epilogue_.prepare(epilogue_.part(tile_, first_m), sums);
  }

 protected:
  static constexpr int kPieces = Epilogue::template kPieces<P>;

  __device__ auto part() const { return epilogue_.part(tile_, first_m_); }

  // All pieces into buffers; how many there are.
  template <int kSums>
  __device__ int stage(const typename Epilogue::Part& part, float (&sums)[kSums]) {
    buffers_.template wait_stored<0>();
    const int num_pieces = epilogue_.template num_pieces<P>(part);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i < num_pieces) epilogue_.stage(buffers_, part, i, sums);
    }
    return num_pieces;
  }
  // And off as they are.
  template <int kSums>
  __device__ void stage_and_store(const typename Epilogue::Part& part, float (&sums)[kSums]) {
    const int num_pieces = stage(part, sums);
    buffers_.release([&] {
      for (int i = 0; i < num_pieces; ++i) epilogue_.store_staged(buffers_, part, i);
    });
  }

  const Epilogue& epilogue_;
  Buffers buffers_;
  WorkTile tile_;
  int32_t first_m_;
};

template <class P, class Epilogue>
class AtOnce : public PiecesOfRows<P, Epilogue> {
  using Base = PiecesOfRows<P, Epilogue>;
  using Base::buffers_;
  using Base::epilogue_;
  using Base::kPieces;

 public:
  using Base::Base;

  // In every step of a main loop, while its products are under way.
  __device__ void advance() {}

  // Those of the rows that were expected.
  template <int kSums>
  __device__ void take(float (&sums)[kSums]) {
    auto part = this->part();
    if (!epilogue_.writes(part)) return;
    if constexpr (Epilogue::kStagesAll) this->stage_and_store(part, sums);
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
};

// What is left over must not load: a load's latency would have to pass within a few steps.
template <class P, class Epilogue>
class LeftOver : public PiecesOfRows<P, Epilogue> {
  static_assert(!Epilogue::kLoads);
  using Base = PiecesOfRows<P, Epilogue>;
  using Base::buffers_;
  using Base::epilogue_;

 public:
  using Base::Base;

  // A slice of what is left.
  __device__ void advance() {
    if (is_any()) step();
  }

  template <int kSums>
  __device__ void take(float (&sums)[kSums]) {
    while (is_any()) step();
    left_ = this->part();
    this->stage_and_store(left_, sums);
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

  int next_ = 0, end_ = 0;  // slices of `left_`
  typename Epilogue::Part left_;
};

// Rows are expected when what the last ones left is sent off.
template <class P, class Epilogue>
class SentLater : public PiecesOfRows<P, Epilogue> {
  using Base = PiecesOfRows<P, Epilogue>;
  using Base::buffers_;
  using Base::epilogue_;
  using Base::kPieces;
  using Base::tile_;
  static_assert(kPieces <= P::kNumBuffers, "a buffer for every piece");
  static_assert(!Epilogue::kStagesAll && Epilogue::kNumSlices == 0 && !Epilogue::kReadsBack);

 public:
  using Base::Base;

  template <int kSums>
  __device__ void take(float (&sums)[kSums]) {
    const auto part = this->part();
    if (!epilogue_.writes(part)) return;
    this->stage(part, sums);
    is_staged_ = true;
  }
  // Sends off what is staged, unless its tile is not to be stored, which `stores` says.
  template <class F>
  __device__ void send(F&& stores) {
    if (!is_staged_) return;
    is_staged_ = false;
    const auto part = this->part();
    const bool is_stored = stores(tile_);
    buffers_.release([&] {
      if (!is_stored) return;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (i < epilogue_.template num_pieces<P>(part)) epilogue_.store(buffers_, part, i);
      }
    });
  }
  __device__ void end() { buffers_.finish(); }

 private:
  bool is_staged_ = false;
};

template <class P, class Epilogue>
using PiecesOf = std::conditional_t<P::kIsLeftOver, LeftOver<P, Epilogue>, AtOnce<P, Epilogue>>;

}  // namespace moire::cuda::sm90
