// Whole rows copied or zeroed, in pieces whose size the host chooses.
#pragma once

#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/device/warp.cuh"

namespace moire::cuda {

// `pieces` pieces by one warp, a few loads of each thread under way at once. What is stored leaves
// the L2 first: the source, which others may read again, stays.
template <class Piece>
__device__ inline void copy_by_warp(const Piece* from, Piece* to, uint32_t pieces) {
  constexpr uint32_t kAtOnce = 4;
  for (uint32_t first = threadIdx.x % kWarp; first < pieces; first += kAtOnce * kWarp) {
    Piece loaded[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i * kWarp < pieces) loaded[i] = from[first + i * kWarp];
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i * kWarp < pieces) __stcs(&to[first + i * kWarp], loaded[i]);
    }
  }
}

// Bytes from p on, zeroed by so many threads: whole words between the first and last few.
__device__ inline void zero_run(uint8_t* p, int64_t bytes, int64_t thread, int64_t threads) {
  const int64_t head = min(bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(p) & 15U));
  const int64_t words = (bytes - head) / 16;
  for (int64_t i = thread; i < head; i += threads) p[i] = 0;
  auto* whole = reinterpret_cast<uint4*>(p + head);
  for (int64_t i = thread; i < words; i += threads) whole[i] = uint4{};
  for (int64_t i = head + 16 * words + thread; i < bytes; i += threads) p[i] = 0;
}

template <class Piece>
__device__ inline void zero_by_warp(Piece* to, uint32_t pieces) {
  for (uint32_t i = threadIdx.x % kWarp; i < pieces; i += kWarp) to[i] = Piece{};
}

// Rows `first` ... `end` - 1, shared out to the warps of all blocks (whose threads lie along x).
template <class Piece>
__device__ inline void zero_rows(const Matrix<Piece>& rows, int64_t first, int64_t end,
                                 uint32_t pieces) {
  const int64_t warps_per_block = blockDim.x / kWarp;
  const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const int64_t warps = int64_t{gridDim.x} * gridDim.y * warps_per_block;
  for (int64_t row = first + block * warps_per_block + threadIdx.x / kWarp; row < end;
       row += warps) {
    zero_by_warp(rows.row(row), pieces);
  }
}

// A tensor in pieces: strides and columns count them.
template <class Piece>
Matrix<Piece> pieces_of(const TensorView& t) {
  const auto size = static_cast<int64_t>(sizeof(Piece));
  return {static_cast<Piece*>(t.data), t.stride() * dtype_size(t.type()) / size};
}
template <class Piece>
uint32_t pieces_per_row(const TensorView& t) {
  return static_cast<uint32_t>(t.columns() * dtype_size(t.type()) /
                               static_cast<int64_t>(sizeof(Piece)));
}

// Calls f.operator()<T>() with a type of so many bytes: an element's, or also 16.
template <class F>
decltype(auto) with_element_bytes(int64_t bytes, F&& f) {
  if (bytes == 8) return std::forward<F>(f).template operator()<uint64_t>();
  if (bytes == 4) return std::forward<F>(f).template operator()<uint32_t>();
  if (bytes == 2) return std::forward<F>(f).template operator()<uint16_t>();
  return std::forward<F>(f).template operator()<uint8_t>();
}
template <class F>
decltype(auto) with_bytes(int64_t bytes, F&& f) {
  if (bytes == kVectorBytes) return std::forward<F>(f).template operator()<uint4>();
  return with_element_bytes(bytes, std::forward<F>(f));
}

// Calls f.operator()<Piece>() with 16 bytes where the tensors' rows allow it, else with their
// element; they have one dtype.
template <class F>
decltype(auto) with_piece(std::initializer_list<TensorView> tensors, F&& f) {
  const TensorView& first = *tensors.begin();
  const int64_t size = dtype_size(first.type());
  const bool is_vector = opens_vectors(tensors) && first.columns() * size % kVectorBytes == 0;
  return with_bytes(is_vector ? kVectorBytes : size, std::forward<F>(f));
}

}  // namespace moire::cuda
