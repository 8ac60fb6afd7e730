// A warp's segments of 64 columns (lane_sums.cuh) on their way from and to memory, in pieces of N
// elements, kSegmentSteps for each of its threads.
//
// The order of the sums gives two (or four) threads a whole segment, so that a warp which loads as
// it sums touches 16 lines of memory at once, 32 bytes of each. Therefore a piece has two owners:
// the thread that moves it, neighbouring threads neighbouring pieces, and the thread that sums it;
// in between it lies in shared memory. Pieces of 16 bytes are read asynchronously, as many rows
// ahead as a kernel has stages, and take no registers meanwhile.
//
//   moved    piece i of a thread: columns from column_of(i) on of the warp's segment segment_of(i)
//   summed   step s of a thread: columns from step_column(s) on of its own segment
#pragma once

#include <cuda_pipeline.h>

#include <type_traits>

#include "backend/cuda/device/lane_sums.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/ptx/copy.cuh"

namespace moire::cuda {

template <class T, int N>
class SegmentPieces {
  static constexpr int kThreadsPerSegment = kSumLanes / N;
  static constexpr int kPiecesPerSegment = kSegment / N;

 public:
  static constexpr int kSegments = kWarp / kThreadsPerSegment;  // of a warp

  // A piece as it is moved, in one instruction.
  using Bits = std::conditional_t<N == 1, T, uint4>;
  static_assert(sizeof(Bits) == sizeof(Packed<T, N>));

  using Shared = Bits[kSegments * kPiecesPerSegment];

  __device__ explicit SegmentPieces(Shared& shared) : pieces_(shared) {}

  __device__ static uint32_t segment_of(uint32_t i) {
    return (i * kWarp + lane()) / kPiecesPerSegment;
  }
  __device__ static uint32_t column_of(uint32_t i) {
    return (i * kWarp + lane()) % kPiecesPerSegment * N;
  }
  __device__ static uint32_t step_column(uint32_t step) {
    return step * kSumLanes + lane() % kThreadsPerSegment * N;
  }

  // Asks for piece i; zeros unless it is there. The caller commits and waits.
  __device__ void fetch(uint32_t i, const T* from, bool is_there) {
    Bits& piece = pieces_[place(segment_of(i), column_of(i))];
    if constexpr (sizeof(Bits) == kVectorBytes) {
      ptx::copy_async(&piece, from, is_there);
    } else {
      piece = is_there ? *reinterpret_cast<const Bits*>(from) : Bits{};
    }
  }
  __device__ void write(uint32_t i, T* to) const {
    *reinterpret_cast<Bits*>(to) = pieces_[place(segment_of(i), column_of(i))];
  }
  // The piece that this thread moves, once it is there.
  __device__ Packed<T, N> moved(uint32_t i) const {
    return unpack(pieces_[place(segment_of(i), column_of(i))]);
  }

  // The piece that this thread sums in a step.
  __device__ Packed<T, N> get(uint32_t step) const { return unpack(pieces_[own_place(step)]); }
  __device__ void set(uint32_t step, const Packed<T, N>& piece) {
    pieces_[own_place(step)] = *reinterpret_cast<const Bits*>(&piece);
  }

 private:
  __device__ static Packed<T, N> unpack(const Bits& bits) {
    const Bits copy = bits;
    return *reinterpret_cast<const Packed<T, N>*>(&copy);
  }
  __device__ static uint32_t lane() { return threadIdx.x % kWarp; }
  // Pieces of a segment change places so that eight threads, moving or summing, meet all banks.
  __device__ static uint32_t place(uint32_t segment, uint32_t column) {
    constexpr uint32_t kTurns = kThreadsPerSegment < 8 ? 8 / kThreadsPerSegment : 1;
    return segment * kPiecesPerSegment + ((column / N) ^ (segment % kTurns * kThreadsPerSegment));
  }
  __device__ static uint32_t own_place(uint32_t step) {
    return place(lane() / kThreadsPerSegment, step_column(step));
  }

  Bits* pieces_;
};

}  // namespace moire::cuda
