// The scores of one token's experts, spread over a team, which are the threads that work on a
// token: what router and its gradient share. Thread i of n holds experts i, i + n, i + 2n, ...
#pragma once

#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/implementation.h"
#include "core/format.h"

namespace moire::cuda::ops {

inline constexpr int64_t kMaxExperts = 4096;
inline constexpr int kRouterThreads = 256;

// A team is a warp, or a block of eight. Its sums and choices have one order, whatever its block
// holds besides.
class WarpTeam {
 public:
  static constexpr int kThreads = kWarp;

  __device__ static int index() { return static_cast<int>(threadIdx.x) % kThreads; }
  __device__ static float sum(float v) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      v += __shfl_xor_sync(kAllLanes, v, distance);
    return v;
  }
  // Of ordinary numbers; NaN is left out.
  __device__ static float max(float v) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, distance));
    }
    return v;
  }
  __device__ static uint32_t max(uint32_t v) { return __reduce_max_sync(kAllLanes, v); }
  __device__ static uint32_t min(uint32_t v) { return __reduce_min_sync(kAllLanes, v); }
  // What thread `from` has.
  __device__ static float of(float v, int from) { return __shfl_sync(kAllLanes, v, from); }
};

class BlockTeam {
 public:
  static constexpr int kThreads = 256;

  __device__ static int index() { return static_cast<int>(threadIdx.x); }
  __device__ static float sum(float v) {
    return over_warps(WarpTeam::sum(v), [](float a, float b) { return a + b; });
  }
  __device__ static float max(float v) {
    return over_warps(WarpTeam::max(v), [](float a, float b) { return fmaxf(a, b); });
  }
  __device__ static uint32_t max(uint32_t v) {
    return over_warps(WarpTeam::max(v), [](uint32_t a, uint32_t b) { return a > b ? a : b; });
  }
  __device__ static uint32_t min(uint32_t v) {
    return over_warps(WarpTeam::min(v), [](uint32_t a, uint32_t b) { return a < b ? a : b; });
  }
  __device__ static float of(float v, int from) {
    __shared__ float shared;
    __syncthreads();
    if (index() == from) shared = v;
    __syncthreads();
    return shared;
  }

 private:
  // The warps' values joined in order.
  template <class T, class Join>
  __device__ static T over_warps(T of_warp, Join join) {
    constexpr int kWarps = kThreads / WarpTeam::kThreads;
    __shared__ T values[kWarps];
    __syncthreads();
    if (WarpTeam::index() == 0) values[index() / WarpTeam::kThreads] = of_warp;
    __syncthreads();
    T all = values[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) all = join(all, values[w]);
    return all;
  }
};

template <class Team, int kPerThread>
struct Scores {
  float values[kPerThread];
  float complements[kPerThread];  // 1 - sigmoid, without cancellation

  __device__ static int expert(int i) { return i * Team::kThreads + Team::index(); }

  __device__ Scores(const AnyFloats& logits, int64_t token, int num_experts, int32_t kind) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      values[i] = expert(i) < num_experts ? logits.at(token, expert(i)) : -INFINITY;
    }
    kind == MOIRE_ROUTER_SIGMOID ? sigmoid() : softmax();
  }

  // The value that expert e has in `of`, for the whole team.
  __device__ static float pick(const float (&of)[kPerThread], int e) {
    float v = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) v = i == e / Team::kThreads ? of[i] : v;
    return Team::of(v, e % Team::kThreads);
  }

 private:
  // A row with NaN or +inf, or with nothing above -inf, has no softmax: all NaN.
  __device__ void softmax() {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) largest = fmaxf(largest, values[i]);
    largest = Team::max(largest);
    float total = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      values[i] = expf(values[i] - largest);
      total += values[i];
    }
    total = Team::sum(total);
    const bool exists = total >= 1.0F;  // the largest logit alone gives exp(0)
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] = exists ? values[i] / total : NAN;
  }
  __device__ void sigmoid() {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const float v = values[i], e = expf(-fabsf(v));
      const float small = e / (1.0F + e), large = 1.0F / (1.0F + e);
      values[i] = v < 0 ? small : large;
      complements[i] = v < 0 ? large : small;
    }
  }
};

// A share of a sum: a sum of zero gives shares of zero.
__device__ inline float share(float score, float sum) { return sum == 0.0F ? 0.0F : score / sum; }
inline float scale_of(float scale) { return scale == 0.0F ? 1.0F : scale; }

// Calls f.operator()<Team, kPerThread>() for a number of experts up to kMaxExperts; on the host.
template <class F>
decltype(auto) with_team(int64_t num_experts, F&& f) {
  if (num_experts <= 64) return f.template operator()<WarpTeam, 2>();
  if (num_experts <= 128) return f.template operator()<WarpTeam, 4>();
  if (num_experts <= 256) return f.template operator()<WarpTeam, 8>();
  if (num_experts <= 512) return f.template operator()<WarpTeam, 16>();
  return f.template operator()<BlockTeam, 16>();
}

// What explain says of either op.
template <class A>
Reason supports_experts(const DeviceState&, const A& args) {
  const int64_t num_experts = args.logits.shape[1];
  if (num_experts <= kMaxExperts) return std::nullopt;
  return concat("logits has ", num_experts, " experts, at most ", kMaxExperts, " are taken");
}
template <class A>
std::string team_policy(const DeviceState&, const A& args) {
  return with_team(args.logits.shape[1], [&]<class Team, int kPerThread>() {
    return concat(Team::kThreads, " threads per token, ", kPerThread, " experts each");
  });
}

}  // namespace moire::cuda::ops
