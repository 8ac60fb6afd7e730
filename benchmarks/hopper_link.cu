// How fast do rows go from one GPU to another, both ways at once? Copies of the driver, stores and
// loads of warps, 16 bytes a thread, and those of TMA through shared memory: what dispatch and
// combine could reach at most (docs/kernels/cuda_ops.md, Experts over ranks).
//
//   cmake --build --preset release --target hopper_link
//   build/release/bin/hopper_link
//
// Prints µs and GB/s of 4096 rows of 7168 and of 2048 BF16, of the slower GPU: the median of seven
// times 20 launches. Needs two GPUs that reach each other's memory.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "backend/cuda/ptx/mbarrier.cuh"

namespace {

using namespace moire::cuda::ptx;

constexpr int kRows = 4096, kMostBytes = 2 * 7168, kThreads = 512, kWarps = kThreads / 32;
constexpr int kSharedBytes = 220 * 1024, kSumming = 256;

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// ---- warps ----

// A row's pieces that this lane has, some at a time: all are loaded, then used.
template <int kAtOnce, class Load, class Use>
__device__ void for_pieces(int row_pieces, const Load& load, const Use& use) {
  for (int first = static_cast<int>(threadIdx.x % 32); first < row_pieces; first += kAtOnce * 32) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * 32 < row_pieces) load(i, first + i * 32);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * 32 < row_pieces) use(i, first + i * 32);
    }
  }
}

// Rows of x to the other GPU, and to this one where `own` is.
template <int kAtOnce>
__global__ void __launch_bounds__(kThreads, 2)
    store_kernel(const uint4* x, uint4* other, uint4* own, int pieces) {
  for (int row = blockIdx.x * kWarps + threadIdx.x / 32; row < kRows; row += gridDim.x * kWarps) {
    const size_t at = size_t(row) * pieces;
    uint4 v[kAtOnce];
    for_pieces<kAtOnce>(
        pieces, [&](int i, int piece) { v[i] = x[at + piece]; },
        [&](int i, int piece) {
          other[at + piece] = v[i];
          if (own != nullptr) own[at + piece] = v[i];
        });
  }
}

__device__ uint4 mixed(const uint4& a, const uint4& b) {
  return {a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w};
}

// Rows of the other GPU and of this one, added up in a way.
template <int kAtOnce>
__global__ void __launch_bounds__(kThreads, 2)
    load_kernel(const uint4* other, const uint4* own, uint4* y, int pieces) {
  for (int row = blockIdx.x * kWarps + threadIdx.x / 32; row < kRows; row += gridDim.x * kWarps) {
    const size_t at = size_t(row) * pieces;
    uint4 a[kAtOnce], b[kAtOnce];
    for_pieces<kAtOnce>(
        pieces,
        [&](int i, int piece) {
          a[i] = other[at + piece];
          b[i] = own[at + piece];
        },
        [&](int i, int piece) { y[at + piece] = mixed(a[i], b[i]); });
  }
}

// ---- TMA ----

__device__ void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
__device__ void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

struct Chunks {
  int count, bytes, stages;
  __device__ int own() const {  // of this block
    return (count - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
           static_cast<int>(gridDim.x);
  }
  __device__ size_t at(int i) const { return (blockIdx.x + size_t(i) * gridDim.x) * bytes; }
};

// One thread of a block has a ring of chunks on their way.
__global__ void __launch_bounds__(32)
    tma_store_kernel(const char* x, char* other, char* own, Chunks chunks) {
  extern __shared__ __align__(128) char ring[];
  __shared__ uint64_t full[16];
  if (threadIdx.x != 0) return;
  for (int i = 0; i < chunks.stages; ++i) mbarrier_init(full + i, 1);
  fence_mbarrier_init();
  const int count = chunks.own(), ahead = chunks.stages - 1;
  const auto stage = [&](int i) { return ring + size_t(i % chunks.stages) * chunks.bytes; };
  const auto load = [&](int i) {
    uint64_t* const barrier = full + i % chunks.stages;
    mbarrier_arrive_expect_tx(barrier, chunks.bytes);
    bulk_load(stage(i), x + chunks.at(i), chunks.bytes, barrier);
  };
  for (int i = 0; i < ahead && i < count; ++i) load(i);
  for (int i = 0; i < count; ++i) {
    mbarrier_wait_parity(full + i % chunks.stages, i / chunks.stages % 2);
    bulk_store(other + chunks.at(i), stage(i), chunks.bytes);
    if (own != nullptr) bulk_store(own + chunks.at(i), stage(i), chunks.bytes);
    asm volatile("cp.async.bulk.commit_group;");
    if (i + ahead >= count) continue;
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    load(i + ahead);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// One thread has both GPUs' chunks on their way, the others add them up.
__global__ void __launch_bounds__(kSumming + 32)
    tma_load_kernel(const char* other, const char* own, char* y, Chunks chunks) {
  extern __shared__ __align__(128) char ring[];
  __shared__ uint64_t full[16], empty[16];
  if (threadIdx.x == 0) {
    for (int i = 0; i < chunks.stages; ++i) {
      mbarrier_init(full + i, 1);
      mbarrier_init(empty + i, kSumming / 32);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int count = chunks.own();
  for (int i = 0; i < count && threadIdx.x <= kSumming; ++i) {
    const int s = i % chunks.stages, turn = i / chunks.stages;
    char* const stage = ring + size_t(s) * 2 * chunks.bytes;
    if (threadIdx.x == kSumming) {
      if (turn > 0) mbarrier_wait_parity(empty + s, (turn - 1) % 2);
      mbarrier_arrive_expect_tx(full + s, 2 * chunks.bytes);
      bulk_load(stage, other + chunks.at(i), chunks.bytes, full + s);
      bulk_load(stage + chunks.bytes, own + chunks.at(i), chunks.bytes, full + s);
      continue;
    }
    mbarrier_wait_parity(full + s, turn % 2);
    const auto *a = reinterpret_cast<const uint4*>(stage), *b = a + chunks.bytes / 16;
    auto* const to = reinterpret_cast<uint4*>(y + chunks.at(i));
    for (int piece = static_cast<int>(threadIdx.x); piece < chunks.bytes / 16; piece += kSumming) {
      to[piece] = mixed(a[piece], b[piece]);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + s);
  }
}

// ---- the host ----

struct Gpu {
  char *x, *window, *own;
  cudaStream_t stream;
  cudaEvent_t begin, end;
};

class Link {
 public:
  Link() {
    for (int d = 0; d < 2; ++d) {
      Gpu& gpu = gpus_[d];
      require(cudaSetDevice(d), "cudaSetDevice");
      require(cudaDeviceEnablePeerAccess(1 - d, 0), "cudaDeviceEnablePeerAccess");
      for (char** p : {&gpu.x, &gpu.window, &gpu.own}) {
        require(cudaMalloc(p, size_t{kRows} * kMostBytes), "cudaMalloc");
      }
      require(cudaStreamCreate(&gpu.stream), "cudaStreamCreate");
      for (cudaEvent_t* e : {&gpu.begin, &gpu.end}) require(cudaEventCreate(e), "cudaEventCreate");
      const auto allow = [](auto* kernel) {
        require(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
            "cudaFuncSetAttribute");
      };
      allow(tma_store_kernel);
      allow(tma_load_kernel);
    }
  }

  // Launches f(this GPU, the other's window) on both, and prints what a launch takes.
  template <class F>
  void time(const std::string& name, int row_bytes, const F& f) {
    constexpr int kTimes = 7, kLaunches = 20, kWarmUp = 3;
    std::vector<float> times;
    for (int t = 0; t < kTimes; ++t) {
      for (int i = 0; i < kWarmUp + kLaunches; ++i) {
        for (int d = 0; d < 2; ++d) {
          require(cudaSetDevice(d), "cudaSetDevice");
          if (i == kWarmUp) require(cudaEventRecord(gpus_[d].begin, gpus_[d].stream), "begin");
          f(d, gpus_[d], gpus_[1 - d]);
        }
      }
      float slower = 0;
      for (int d = 0; d < 2; ++d) {
        float ms = 0;
        require(cudaSetDevice(d), "cudaSetDevice");
        require(cudaEventRecord(gpus_[d].end, gpus_[d].stream), "end");
        require(cudaStreamSynchronize(gpus_[d].stream), name.c_str());
        require(cudaGetLastError(), name.c_str());
        require(cudaEventElapsedTime(&ms, gpus_[d].begin, gpus_[d].end), "cudaEventElapsedTime");
        slower = std::max(slower, ms / kLaunches);
      }
      times.push_back(slower);
    }
    std::sort(times.begin(), times.end());
    const float ms = times[kTimes / 2];
    std::printf("  %-44s %7.1f us %6.1f GB/s\n", name.c_str(), 1e3F * ms,
                double(kRows) * row_bytes / ms / 1e6);
  }

 private:
  Gpu gpus_[2];
};

void time_rows(Link& link, int columns) {
  const int row_bytes = 2 * columns, pieces = row_bytes / 16;
  const size_t all = size_t{kRows} * row_bytes;
  const auto as = [](char* p) { return reinterpret_cast<uint4*>(p); };
  std::printf("rows of %d BF16\n", columns);
  link.time("copies of the driver", row_bytes, [&](int d, const Gpu& g, const Gpu& other) {
    cudaMemcpyPeerAsync(other.window, 1 - d, g.x, d, all, g.stream);
  });
  link.time("stores of warps", row_bytes, [&](int, const Gpu& g, const Gpu& other) {
    store_kernel<4><<<264, kThreads, 0, g.stream>>>(as(g.x), as(other.window), nullptr, pieces);
  });
  link.time("and of own rows", row_bytes, [&](int, const Gpu& g, const Gpu& other) {
    store_kernel<4><<<264, kThreads, 0, g.stream>>>(as(g.x), as(other.window), as(g.own), pieces);
  });
  link.time("loads of warps", row_bytes, [&](int, const Gpu& g, const Gpu& other) {
    load_kernel<2><<<264, kThreads, 0, g.stream>>>(as(other.window), as(g.own), as(g.x), pieces);
  });
  for (const int share : {1, 2, 4}) {
    for (const int stages : {4, 8}) {
      const Chunks chunks{kRows * share, row_bytes / share, stages};
      const int bytes = stages * chunks.bytes;
      const auto label = [&](const char* what) {
        return what + std::to_string(chunks.bytes) + " bytes, " + std::to_string(stages) + " deep";
      };
      const auto blocks = [](int of_block) {
        return 132 * std::clamp(kSharedBytes / of_block, 0, 4);
      };
      if (bytes <= kSharedBytes) {
        link.time(label("stores of TMA, "), row_bytes, [&](int, const Gpu& g, const Gpu& other) {
          tma_store_kernel<<<blocks(bytes), 32, bytes, g.stream>>>(g.x, other.window, g.own,
                                                                   chunks);
        });
      }
      if (2 * bytes <= kSharedBytes) {
        link.time(label("loads of TMA, "), row_bytes, [&](int, const Gpu& g, const Gpu& other) {
          tma_load_kernel<<<blocks(2 * bytes), kSumming + 32, 2 * bytes, g.stream>>>(
              other.window, g.own, g.x, chunks);
        });
      }
    }
  }
}

}  // namespace

int main() {
  int count = 0;
  require(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (count < 2) {
    std::printf("hopper_link: found %d GPU, needs two that reach each other\n", count);
    return 1;
  }
  Link link;
  for (const int columns : {7168, 2048}) time_rows(link, columns);
}
