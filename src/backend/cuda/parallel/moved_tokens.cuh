// What kernels that move tokens between ranks share: a warp takes a token at a time.
#pragma once

#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/parallel/meeting.h"

namespace moire::cuda {

inline constexpr int kMovingWarps = 16;  // of a block

// A rank's tokens, and which rows of the ranks' windows are theirs.
struct Tokens {
  Matrix<const int32_t> places;
  int64_t count;
  Ranks ranks;
  int64_t room;  // rows of a rank for each other
  const uint32_t* goes;
  const char* name = "places";  // a literal of the host, which reads it in a finding

  // The row of a rank's window that has a token; -1: none.
  __device__ int64_t row(int64_t token, int at) const {
    const int64_t place = places.row(token)[at];
    return place >= 0 && place < room ? ranks.rank * room + place : -1;
  }
  // By a warp: says of places that there are not.
  __device__ void check(int64_t token, const Reporter& reporter) const {
    for (int d = threadIdx.x % kWarp; d < ranks.size; d += kWarp) {
      const int32_t place = places.row(token)[d];
      if (place >= -1 && place < room) continue;
      report(reporter, Finding::kIndexOutside, token * ranks.size + d, place, room, name);
    }
  }
};

inline Tokens tokens_of(const DeviceExchange& exchange, const TensorView& places) {
  return {matrix_of<const int32_t>(places), places.shape[0], exchange.ranks(), exchange.room(),
          exchange.goes()};
}

// Choices of the tokens; absent where idx is.
struct Choices {
  Indices idx;
  int64_t k, num_experts, local_experts;

  // By a lane per choice: its expert, or -1 where it goes nowhere, which a value that there is not
  // does as well, and is reported.
  __device__ int64_t expert(int64_t token, int64_t j, const Reporter& reporter) const {
    const int64_t expert = checked_index(idx, token * k + j, idx.at(token, j), num_experts + 1,
                                         Dropping::kAllowed, reporter);
    return expert == num_experts ? -1 : expert;
  }
};

inline Choices choices_of(const TensorView& topk_idx, int64_t num_experts, int64_t num_ranks) {
  return {indices_of(topk_idx, "topk_idx"), topk_idx.is_present() ? topk_idx.shape[1] : 0,
          num_experts, num_experts / num_ranks};
}

}  // namespace moire::cuda
