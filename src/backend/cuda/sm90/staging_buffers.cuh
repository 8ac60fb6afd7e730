// StagingBuffers: memory between registers and TMA, of a consumer warpgroup or, where a policy has
// it so, of a warp. A buffer is 64 rows (or 16) of 128 bytes with TMA's 128-byte swizzle, of which
// each warp writes and reads its own 16. One lane issues the copies, of all its rows, and waits for
// them; a barrier of its warps, or __syncwarp, does the rest.
#pragma once

#include <cuda_bf16.h>

#include "backend/cuda/ptx/matrix.cuh"
#include "backend/cuda/ptx/tma.cuh"
#include "backend/cuda/ptx/warps.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

namespace moire::cuda::sm90 {

template <class P>
class StagingBuffers {
 public:
  using Policy = P;
  static constexpr int kNumBuffers = P::kNumBuffers;
  using Memory = char[P::kNumBuffers][P::kBufferBytes];
  __device__ StagingBuffers(Memory& memory, uint64_t (&full)[P::kNumBuffers], int consumer,
                            int warp)
      : memory_(memory), full_(full), consumer_(consumer), warp_(warp) {}

  // Calls f in one lane, always the same: groups of copies are a thread's own. Its rows are a box's
  // first.
  template <class F>
  __device__ void by_leader(F&& f) const {
    if (warp_ != 0) return;
    // One condition for both would hide from the compiler that it is one lane.
    if (ptx::elect_one()) f();
  }

  // ---- for epilogues that only store: buffers in turn, each store a group of its own ----

  // The next buffer, once no copy reads it any more.
  __device__ char* acquire() {
    wait_stored<P::kNumBuffers - 1>();
    char* const buffer = at(next_);
    next_ = next_ + 1 == P::kNumBuffers ? 0 : next_ + 1;
    return buffer;
  }

  // The same from its first row on, of an epilogue whose warps write to all rows.
  __device__ char* acquire_whole() { return acquire() - (at(0) - memory_[0]); }

  // ---- for epilogues that name their buffers ----

  // This warp's rows in a buffer; in the index-th of the places with kRowBytes a row.
  __device__ char* at(int index) const { return place<128>(index); }
  template <int kRowBytes>
  __device__ char* place(int index) const {
    return memory_[0] + (index * P::kWarpsOfBox + warp_) * 16 * kRowBytes;
  }
  __device__ uint64_t* full(int index) const { return &full_[index]; }
  // Waits for what the leader loaded with full(index).
  __device__ void wait_full(int index) {
    ptx::mbarrier_wait_parity(&full_[index], phases_ >> index & 1);
    phases_ ^= 1u << index;
  }

  // ---- for both ----

  // Waits until at most kPending of the stores still read their buffers.
  template <int kPending>
  __device__ void wait_stored() {
    by_leader([] { ptx::bulk_wait_group_read<kPending>(); });
    join();
  }
  // What the warps wrote may be copied: `copy` is called by one lane, and becomes one group.
  template <class F>
  __device__ void release(F&& copy) {
    ptx::fence_proxy_async();
    join();
    by_leader([&] {
      copy();
      ptx::bulk_commit_group();
    });
  }
  // The warps that a box is of.
  __device__ void join() const {
    if constexpr (P::kWarpsOfBox == 1) __syncwarp();
    if constexpr (P::kWarpsOfBox == 4) ptx::sync_warpgroup(consumer_);
  }
  // Shared memory must not go away under a copy.
  __device__ void finish() {
    by_leader([] { ptx::bulk_wait_group_read<0>(); });
  }

 private:
  Memory& memory_;
  uint64_t (&full_)[P::kNumBuffers];
  int consumer_, warp_;
  int next_ = 0;
  uint32_t phases_ = 0;
};

// Byte offset of the 16-byte unit `unit` of row `row` of a buffer; of half a buffer, where rows
// are 64 bytes.
template <int kRowBytes = 128>
__device__ inline uint32_t swizzled(int row, int unit) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  const int mask = kRowBytes == 128 ? row & 7 : row / 2 & 3;
  return static_cast<uint32_t>(row * kRowBytes + ((unit ^ mask) * 16));
}

// Sums as wgmma leaves them: of column group j (8 columns), a lane holds columns 2 (lane % 4) and
// the next of row lane / 4 in sums[4 j] and [4 j + 1], and of row lane / 4 + 8 in the next two.

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline float2 unpack(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
}

// BF16 pairs of two neighbouring column groups in a lane's order: words[0] and [1] are of the first
// group, of the lane's first and second row; [2] and [3] of the second group.
using Words = uint32_t[4];

__device__ inline void pack_sums(const float* sums, Words& words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pack(sums[2 * i], sums[2 * i + 1]);
}

// The first half of `sums` becomes their words, two sums each.
template <int kSums>
__device__ inline void pack_in_place(float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums / 2; ++i) {
    sums[i] = __uint_as_float(pack(sums[2 * i], sums[2 * i + 1]));
  }
}
// Of column groups j and j + 1.
__device__ inline void packed_words(const float* packed, int j, Words& words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(packed[2 * j + i]);
}

// The address that this lane gives to stmatrix and ldmatrix for column groups j and j + 1.
template <int kRowBytes = 128>
__device__ inline uint32_t matrix_address(const char* buffer, int j) {
  const int lane = threadIdx.x % 32;
  return ptx::shared_address(buffer) + swizzled<kRowBytes>(lane % 16, j + lane / 16);
}
template <int kRowBytes = 128>
__device__ inline void write_words(char* buffer, int j, const Words& words) {
  ptx::stmatrix_x4(matrix_address<kRowBytes>(buffer, j), words);
}
template <int kRowBytes = 128>
__device__ inline void read_words(const char* buffer, int j, Words& words) {
  ptx::ldmatrix_x4(matrix_address<kRowBytes>(buffer, j), words);
}

// The sums of 64 columns, rounded, into a buffer; kArePacked: they are words (pack_in_place).
template <bool kArePacked>
__device__ inline void write_sums(char* buffer, const float* sums) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    Words words;
    kArePacked ? packed_words(sums, j, words) : pack_sums(sums + 4 * j, words);
    write_words(buffer, j, words);
  }
}

}  // namespace moire::cuda::sm90
