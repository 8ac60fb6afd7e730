// Which tile, ring and cluster feed the tensor cores of an SM90 best? A grouped BF16 GEMM main
// loop, one kernel template, timed over the choices that the fused kernels depend on; the last
// lines ask how fast wgmma runs when nothing has to be loaded.
//
//   cmake --build --preset release --target hopper_mainloop
//   build/release/bin/hopper_mainloop > result.jsonl
//
// d[e] = a[e] * b[e]^T for groups of equal, 128-aligned size. Producer warp: TMA loads into a ring.
// Two consumer warpgroups: wgmma on 64 rows each, sums rounded to BF16 and stored from registers.
// Barriers per stage: full (1 arrival + bytes), empty (one arrival per consumer warpgroup of the
// cluster).
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/tma.cuh"
#include "backend/cuda/ptx/warps.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

namespace {

using namespace moire::cuda::ptx;
using bf16 = __nv_bfloat16;

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives on the barrier at the same shared-memory offset in block `rank` of the cluster. It says
// that something was read, and publishes no writes: `.release.cluster` would make it a fence of all
// memory, microseconds long.
__device__ inline void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// A 2-d box into each block of the cluster whose bit is set in `blocks`, at the same offset; each
// block's barrier at the same offset receives the bytes.
__device__ inline void tma_load_2d_multicast(void* target, const CUtensorMap* map,
                                             uint64_t* barrier, int32_t x, int32_t y,
                                             uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

constexpr int kTileM = 128, kTileK = 64, kConsumers = 2, kThreads = 128 * (kConsumers + 1);

enum class Share { kNothing, kB, kA };  // what the two blocks of a cluster load together

template <int kN, int kNumStages, Share kShared, int kInFlight, bool kLoads = true>
struct Variant {
  static constexpr int kTileN = kN, kStages = kNumStages, kPending = kInFlight;
  static constexpr Share kShare = kShared;
  static constexpr bool kLoad = kLoads;  // false: the ring is filled once, then only multiplied
  static constexpr int kCluster = kShare == Share::kNothing ? 1 : 2;
  static constexpr int kABytes = kTileM * kTileK * 2, kBBytes = kTileN * kTileK * 2;
  static constexpr int kSharedBytes = kStages * (kABytes + kBBytes) + 2048;
};

template <class V>
struct alignas(1024) SharedMemory {
  char a[V::kStages][V::kABytes];
  char b[V::kStages][V::kBBytes];
  uint64_t full[V::kStages], empty[V::kStages];
};

struct Problem {
  int groups, m, n, k;
  bf16* d;
};

// Where a block works: tiles of one group after another; within it, bands of eight row tiles, so
// that B stays in the L2.
template <class V>
__device__ bool find_tile(const Problem& p, int index, int rank, int& group, int& m0, int& n0) {
  const int step_m = V::kShare == Share::kB ? 2 : 1, step_n = V::kShare == Share::kA ? 2 : 1;
  const int tiles_m = p.m / (kTileM * step_m),
            tiles_n = (p.n + V::kTileN * step_n - 1) / (V::kTileN * step_n);
  const int per_group = tiles_m * tiles_n;
  group = index / per_group;
  if (group >= p.groups) return false;
  index %= per_group;
  constexpr int kBand = 8;
  const int band = index / (kBand * tiles_n), first = band * kBand;
  const int height = min(kBand, tiles_m - first);
  index -= first * tiles_n;
  m0 = ((first + index % height) * step_m + (V::kShare == Share::kB ? rank : 0)) * kTileM;
  n0 = (index / height * step_n + (V::kShare == Share::kA ? rank : 0)) * V::kTileN;
  return true;
}

template <class V>
__device__ void load_stage(const CUtensorMap* a, const CUtensorMap* b, SharedMemory<V>& s,
                           int stage, int rank, int group, const Problem& p, int m0, int n0,
                           int k0) {
  mbarrier_arrive_expect_tx(&s.full[stage], V::kABytes + V::kBBytes);
  const int row_a = group * p.m + m0, row_b = group * p.n + n0;
  if constexpr (V::kShare == Share::kA) {
    constexpr int kHalf = kTileM / 2;
    tma_load_2d_multicast(s.a[stage] + rank * kHalf * 128, a, &s.full[stage], k0,
                          row_a + rank * kHalf, 3);
  } else {
    tma_load_2d(s.a[stage], a, &s.full[stage], k0, row_a);
  }
  if constexpr (V::kShare == Share::kB) {
    constexpr int kHalf = V::kTileN / 2;
    tma_load_2d_multicast(s.b[stage] + rank * kHalf * 128, b, &s.full[stage], k0,
                          row_b + rank * kHalf, 3);
  } else {
    tma_load_2d(s.b[stage], b, &s.full[stage], k0, row_b);
  }
}

template <class V>
__device__ void produce(const CUtensorMap* a, const CUtensorMap* b, SharedMemory<V>& s,
                        const Problem& p, int rank) {
  int iteration = 0, group, m0, n0;
  for (int index = blockIdx.x / V::kCluster; find_tile<V>(p, index, rank, group, m0, n0);
       index += gridDim.x / V::kCluster) {
    for (int k0 = 0; k0 < p.k; k0 += kTileK, ++iteration) {
      const int stage = iteration % V::kStages, round = iteration / V::kStages;
      if (!V::kLoad && round > 0) return;
      if (round > 0) mbarrier_wait_parity(&s.empty[stage], (round - 1) & 1);
      load_stage<V>(a, b, s, stage, rank, group, p, m0, n0, k0);
    }
  }
  // A block must not end while its partner may still arrive on its barriers.
  for (int i = 0; V::kCluster > 1 && i < V::kStages; ++i, ++iteration) {
    const int round = iteration / V::kStages;
    if (round > 0) mbarrier_wait_parity(&s.empty[iteration % V::kStages], (round - 1) & 1);
  }
}

template <class V>
__device__ void release(SharedMemory<V>& s, int stage) {
  const int lane = threadIdx.x % 128;
  if (V::kCluster == 1) {
    if (lane == 0) mbarrier_arrive(&s.empty[stage]);
  } else if (lane < V::kCluster) {
    mbarrier_arrive_cluster(&s.empty[stage], lane);
  }
}

template <class V>
__device__ void store(const float (&sums)[V::kTileN / 2], const Problem& p, int group, int m0,
                      int n0, int consumer) {
  const int thread = threadIdx.x % 128;
  const int row = m0 + consumer * 64 + thread / 32 * 16 + thread % 32 / 4;
  bf16* const d = p.d + (static_cast<int64_t>(group) * p.m + row) * p.n + n0 + thread % 4 * 2;
#pragma unroll
  for (int j = 0; j < V::kTileN / 8; ++j) {
    if (n0 + j * 8 >= p.n) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<__nv_bfloat162*>(d + static_cast<int64_t>(half) * 8 * p.n + j * 8) =
          __floats2bfloat162_rn(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
    }
  }
}

template <class V>
__device__ void multiply_stage(float (&sums)[V::kTileN / 2], SharedMemory<V>& s, int stage,
                               int consumer, bool first) {
  const uint32_t a = operand_descriptor(shared_address(s.a[stage] + consumer * 64 * 128));
  const uint32_t b = operand_descriptor(shared_address(s.b[stage]));
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kTileK / 16; ++i)
    wgmma_m64k16<V::kTileN>(sums, a + 2 * i, b + 2 * i, !first || i > 0);
  wgmma_commit_group();
}

template <class V>
__device__ void consume(SharedMemory<V>& s, const Problem& p, int rank, int consumer) {
  int iteration = 0, group, m0, n0;
  for (int index = blockIdx.x / V::kCluster; find_tile<V>(p, index, rank, group, m0, n0);
       index += gridDim.x / V::kCluster) {
    float sums[V::kTileN / 2];
    const int num_k = p.k / kTileK;
    for (int k = 0; k < num_k; ++k, ++iteration) {
      const int stage = iteration % V::kStages, round = iteration / V::kStages;
      if (V::kLoad || round == 0) mbarrier_wait_parity(&s.full[stage], round & 1);
      multiply_stage<V>(sums, s, stage, consumer, k == 0);
      wgmma_wait_group<V::kPending>();
      if (V::kLoad && V::kPending == 0) release<V>(s, stage);
      if (V::kLoad && V::kPending == 1 && k > 0) release<V>(s, (iteration - 1) % V::kStages);
    }
    wgmma_wait_group<0>();
    if (V::kLoad && V::kPending == 1) release<V>(s, (iteration - 1) % V::kStages);
    store<V>(sums, p, group, m0, n0, consumer);
  }
}

template <class V>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                 const Problem p) {
  extern __shared__ char raw[];
  auto& s =
      *reinterpret_cast<SharedMemory<V>*>((reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  const int rank = V::kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < V::kStages; ++i) {
      mbarrier_init(&s.full[i], 1);
      mbarrier_init(&s.empty[i], kConsumers * V::kCluster);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (V::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) produce<V>(&a, &b, s, p, rank);
  } else {
    setmaxnreg_inc<232>();
    consume<V>(s, p, rank, warpgroup - 1);
  }
}

// ---- host ----

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s failed: %s\n", call, cudaGetErrorString(error));
  std::exit(1);
}

CUtensorMap encode(void* data, int64_t rows, int64_t columns, int box_rows) {
  static PFN_cuTensorMapEncodeTiled_v12000 function = nullptr;
  if (function == nullptr) {
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled",
                                           reinterpret_cast<void**>(&function), 12000,
                                           cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion");
  }
  CUtensorMap map;
  const cuuint64_t shape[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {kTileK, static_cast<cuuint32_t>(box_rows)}, one[2] = {1, 1};
  const CUresult result =
      function(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, shape, stride, box, one,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::fprintf(stderr, "cuTensorMapEncodeTiled failed: %d\n", static_cast<int>(result));
    std::exit(1);
  }
  return map;
}

__global__ void fill(bf16* p, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    // Four 16-bit uniforms of a hash: close enough to normal for the power that the multipliers
    // draw.
    uint64_t h = (static_cast<uint64_t>(i) + seed) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 31;
    h *= 0xBF58476D1CE4E5B9ull;
    h ^= h >> 27;
    float sum = 0;
    for (int j = 0; j < 4; ++j) sum += static_cast<float>(h >> (16 * j) & 0xFFFF) / 65536.0f - 0.5f;
    p[i] = __float2bfloat16(sum * 1.7f);
  }
}

__global__ void count_wrong(const bf16* a, const bf16* b, Problem p, int samples, int* wrong) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= samples) return;
  uint64_t h = (i + 1) * 0x9E3779B97F4A7C15ull;
  const int group = h % p.groups, row = (h >> 20) % p.m, column = (h >> 40) % p.n;
  double sum = 0, size = 0;
  for (int k = 0; k < p.k; ++k) {
    const double product =
        static_cast<double>(
            __bfloat162float(a[(static_cast<int64_t>(group) * p.m + row) * p.k + k])) *
        __bfloat162float(b[(static_cast<int64_t>(group) * p.n + column) * p.k + k]);
    sum += product;
    size += fabs(product);
  }
  const double got =
      __bfloat162float(p.d[(static_cast<int64_t>(group) * p.m + row) * p.n + column]);
  const double bound = (p.k + 8) * 0x1p-24 * size + fabs(sum) * 0x1p-8;
  if (!(fabs(got - sum) <= bound)) atomicAdd(wrong, 1);
}

template <class V>
const char* name(char (&text)[96]) {
  static const char* kShares[] = {"none", "B", "A"};
  std::snprintf(text, sizeof(text), "128x%dx64, %d stages, shared %s, in flight %d%s", V::kTileN,
                V::kStages, kShares[static_cast<int>(V::kShare)], V::kPending,
                V::kLoad ? "" : ", no loads");
  return text;
}

struct Buffers {
  bf16 *a, *b, *d;
  int* wrong;
};

template <class V>
void run(const Buffers& buffers, int groups, int m, int n, int k) {
  if (V::kShare == Share::kB && m % (2 * kTileM) != 0) return;
  if (V::kShare == Share::kA && n % (2 * V::kTileN) != 0) return;
  if (n % V::kTileN != 0 && n % 8 != 0) return;
  const Problem p{groups, m, n, k, buffers.d};
  const CUtensorMap a = encode(buffers.a, static_cast<int64_t>(groups) * m, k,
                               V::kShare == Share::kA ? kTileM / 2 : kTileM);
  const CUtensorMap b = encode(buffers.b, static_cast<int64_t>(groups) * n, k,
                               V::kShare == Share::kB ? V::kTileN / 2 : V::kTileN);
  check(cudaFuncSetAttribute(grouped_gemm<V>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             V::kSharedBytes),
        "attribute");
  cudaLaunchConfig_t config{};
  config.gridDim = 132;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = V::kSharedBytes;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {V::kCluster, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  check(cudaMemset(buffers.d, 0xFF, static_cast<size_t>(groups) * m * n * 2), "memset");
  const auto launch = [&] {
    check(cudaLaunchKernelEx(&config, grouped_gemm<V>, a, b, p), "launch");
  };
  launch();
  int wrong = 0;
  if (V::kLoad) {
    check(cudaMemset(buffers.wrong, 0, 4), "memset");
    count_wrong<<<128, 128>>>(buffers.a, buffers.b, p, 16384, buffers.wrong);
    check(cudaMemcpy(&wrong, buffers.wrong, 4, cudaMemcpyDeviceToHost), "result");
  }
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < 13; ++i) {
    check(cudaEventRecord(begin), "record");
    for (int j = 0; j < 3; ++j) launch();
    check(cudaEventRecord(end), "record");
    check(cudaEventSynchronize(end), "kernel");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (i >= 3) times.push_back(ms / 3);
  }
  std::sort(times.begin(), times.end());
  char text[96];
  const double flop = 2.0 * groups * m * n * k;
  std::printf(
      "{\"variant\": \"%s\", \"groups\": %d, \"m\": %d, \"n\": %d, \"k\": %d, \"ms\": %.4f, "
      "\"tflops\": %.1f, "
      "\"tflops_best\": %.1f, \"wrong\": %d}\n",
      name<V>(text), groups, m, n, k, times[times.size() / 2], flop / times[times.size() / 2] / 1e9,
      flop / times[0] / 1e9, wrong);
  std::fflush(stdout);
}

}  // namespace

// With the argument "small": one small problem, for compute-sanitizer.
int main(int argc, char** argv) {
  // groups, rows of each, n, k: large; FC1 of a coarse and of a fine-grained model; FC2 of the
  // latter
  const int shapes[][4] = {{1, 8192, 8192, 8192},  {8, 2048, 4096, 4096}, {32, 1024, 4096, 7168},
                           {128, 512, 1536, 2048}, {128, 512, 2048, 768}, {128, 256, 1536, 2048},
                           {128, 128, 1536, 2048}};
  Buffers buffers;
  const size_t bytes = size_t{argc > 1 ? 1u : 2048u} << 20;
  check(cudaMalloc(&buffers.a, bytes), "malloc");
  check(cudaMalloc(&buffers.b, bytes), "malloc");
  check(cudaMalloc(&buffers.d, bytes), "malloc");
  check(cudaMalloc(&buffers.wrong, 4), "malloc");
  fill<<<1024, 256>>>(buffers.a, bytes / 2, 1);
  fill<<<1024, 256>>>(buffers.b, bytes / 2, 99);
  if (argc > 1 && std::strcmp(argv[1], "small") == 0) {
    run<Variant<128, 6, Share::kNothing, 1>>(buffers, 2, 256, 256, 512);
    run<Variant<128, 6, Share::kB, 1>>(buffers, 2, 256, 256, 512);
    return 0;
  }
  for (const auto& s : shapes) {
    run<Variant<256, 4, Share::kNothing, 0>>(buffers, s[0], s[1], s[2], s[3]);
    run<Variant<256, 4, Share::kNothing, 1>>(buffers, s[0], s[1], s[2], s[3]);
    run<Variant<256, 4, Share::kB, 1>>(buffers, s[0], s[1], s[2], s[3]);
    run<Variant<256, 4, Share::kA, 1>>(buffers, s[0], s[1], s[2], s[3]);
    run<Variant<256, 3, Share::kNothing, 1>>(buffers, s[0], s[1], s[2], s[3]);
    run<Variant<192, 5, Share::kNothing, 1>>(buffers, s[0], s[1], s[2], s[3]);
    run<Variant<192, 5, Share::kA, 1>>(buffers, s[0], s[1], s[2], s[3]);
    run<Variant<128, 6, Share::kNothing, 1>>(buffers, s[0], s[1], s[2], s[3]);
    run<Variant<128, 6, Share::kB, 1>>(buffers, s[0], s[1], s[2], s[3]);
    run<Variant<128, 6, Share::kA, 1>>(buffers, s[0], s[1], s[2], s[3]);
  }
  run<Variant<256, 4, Share::kNothing, 1, false>>(buffers, 1, 8192, 8192, 8192);
  run<Variant<192, 4, Share::kNothing, 1, false>>(buffers, 1, 8192, 8064, 8192);
  run<Variant<128, 4, Share::kNothing, 1, false>>(buffers, 1, 8192, 8192, 8192);
  run<Variant<64, 4, Share::kNothing, 1, false>>(buffers, 1, 8192, 8192, 8192);
  check(cudaDeviceSynchronize(), "end");
  return 0;
}
