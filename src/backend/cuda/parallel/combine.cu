// combine on CUDA: a warp takes a token and sums its rows from the windows of the ranks that it
// went to, rank 0 first: a thread 16 bytes of two ranks' rows at two places at a time, all loads
// under way before the first addition. Then the weights of its choices.
#include <algorithm>

#include "backend/cuda/implementations.h"
#include "backend/cuda/parallel/moved_tokens.cuh"
#include "core/format.h"
#include "core/status_macros.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = kMovingWarps * kWarp;
constexpr int kRanksAtOnce = 2, kPiecesAtOnce = 2;

template <class From, class To>
struct Summed {
  Tokens tokens;
  Matrix<const From> rows;  // this rank's own
  Matrix<To> y;
  uint32_t pieces;  // of a row
  Choices choices;
  Matrix<const float> weights_recv;
  Matrix<float> weights;
};

// The ranks that a token went to, of 32 at a time, lowest first; a warp calls all together.
class RanksOfToken {
 public:
  __device__ RanksOfToken(const Tokens& tokens, int64_t token, int first) : first_(first) {
    const int rank = first + static_cast<int>(threadIdx.x % kWarp);
    row_ = rank < tokens.ranks.size ? tokens.row(token, rank) : -1;
    left_ = __ballot_sync(kAllLanes, row_ >= 0);
  }
  __device__ bool any() const { return left_ != 0; }
  // The next one's row of this token, null where there is none.
  template <class From>
  __device__ const From* next(const Tokens& tokens, const Matrix<const From>& rows) {
    if (left_ == 0) return nullptr;
    const int lane = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    return tokens.ranks.at(first_ + lane, rows.row(__shfl_sync(kAllLanes, row_, lane)));
  }

 private:
  int first_;
  int64_t row_;
  uint32_t left_;
};

// Sums of one token's row, from a piece on, each kWarp pieces after the last.
template <int N, class From, class To>
struct Sums {
  float sum[kPiecesAtOnce][N] = {};
  bool is_first = true;

  __device__ void add(const From* const (&rows)[kRanksAtOnce], uint32_t piece, uint32_t pieces) {
    Packed<From, N> loaded[kRanksAtOnce][kPiecesAtOnce];
#pragma unroll
    for (int r = 0; r < kRanksAtOnce; ++r) {
#pragma unroll
      for (int p = 0; p < kPiecesAtOnce; ++p) {
        loaded[r][p] = {};
        if (rows[r] == nullptr || piece + p * kWarp >= pieces) continue;
        loaded[r][p] = load<N>(rows[r] + (piece + p * kWarp) * N);
      }
    }
#pragma unroll
    for (int r = 0; r < kRanksAtOnce; ++r) {
      if (rows[r] == nullptr) continue;
#pragma unroll
      for (int p = 0; p < kPiecesAtOnce; ++p) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          sum[p][i] = is_first ? loaded[r][p][i] : sum[p][i] + loaded[r][p][i];
        }
      }
      is_first = false;
    }
  }
  __device__ void store_to(To* y, uint32_t piece, uint32_t pieces) const {
#pragma unroll
    for (int p = 0; p < kPiecesAtOnce; ++p) {
      if (piece + p * kWarp >= pieces) continue;
      Packed<To, N> out;
#pragma unroll
      for (int i = 0; i < N; ++i) out.set(i, sum[p][i]);
      store(y + (piece + p * kWarp) * N, out);
    }
  }
};

// Each choice's weight at the one rank that has its expert.
template <class From, class To>
__device__ void fetch_weights(const Summed<From, To>& args, int64_t token,
                              const Reporter& reporter) {
  for (int64_t j = threadIdx.x % kWarp; j < args.choices.k; j += kWarp) {
    const int64_t expert = args.choices.expert(token, j, reporter);
    const auto owner = expert < 0 ? 0 : static_cast<int>(expert / args.choices.local_experts);
    const int64_t row = expert < 0 ? -1 : args.tokens.row(token, owner);
    args.weights.row(token)[j] =
        row < 0 ? 0.0F : *args.tokens.ranks.at(owner, args.weights_recv.row(row) + j);
  }
}

template <int N, class From, class To>
__global__ void __launch_bounds__(kThreads, 2)
    sum_kernel(Summed<From, To> args, Reporter reporter) {
  const Tokens& tokens = args.tokens;
  if (*tokens.goes == 0) return;
  const uint32_t lane = threadIdx.x % kWarp;
  for (int64_t token = int64_t{blockIdx.x} * kMovingWarps + threadIdx.x / kWarp;
       token < tokens.count; token += int64_t{gridDim.x} * kMovingWarps) {
    tokens.check(token, reporter);
    for (uint32_t first = 0; first < args.pieces; first += kPiecesAtOnce * kWarp) {
      Sums<N, From, To> sums;
      for (int some = 0; some < tokens.ranks.size; some += kWarp) {
        RanksOfToken ranks(tokens, token, some);
        while (ranks.any()) {
          const From* rows[kRanksAtOnce];
#pragma unroll
          for (const From*& row : rows) row = ranks.next(tokens, args.rows);
          sums.add(rows, first + lane, args.pieces);
        }
      }
      sums.store_to(args.y.row(token), first + lane, args.pieces);
    }
    fetch_weights(args, token, reporter);
  }
}

// Calls f.operator()<N, From, To>(their types) for every kernel that there is.
template <class F>
void for_each_kernel(F&& f) {
  const auto with = [&]<class From, class To>(DType from, DType to) {
    f.template operator()<kVector<From>, From, To>(from, to);
    f.template operator()<1, From, To>(from, to);
  };
  with.template operator()<float, float>(DType::kFP32, DType::kFP32);
  with.template operator()<__nv_bfloat16, __nv_bfloat16>(DType::kBF16, DType::kBF16);
  with.template operator()<__nv_bfloat16, float>(DType::kBF16, DType::kFP32);
  with.template operator()<__half, __half>(DType::kFP16, DType::kFP16);
  with.template operator()<__half, float>(DType::kFP16, DType::kFP32);
}

bool takes_vectors(const CombineArgs& args) {
  const TensorView rows(args.rows), y(args.y);
  return rows.is_present() && opens_vectors({rows, y}) &&
         y.columns() * dtype_size(rows.type()) % kVectorBytes == 0;
}

// Without rows any kernel will do.
bool is_for(const CombineArgs& args, DType from, DType to) {
  const bool has_rows = is_present(args.rows);
  return (has_rows ? TensorView(args.rows).type() : DType::kFP32) == from &&
         (has_rows ? TensorView(args.y).type() : DType::kFP32) == to;
}

Status run(const Context& context, const CombineArgs& args) {
  Launcher launcher(context, "combine");
  const TensorView places(args.places), y(args.y);
  const int64_t ranks = places.shape[1];
  const int64_t num_rows =
      is_present(args.rows) ? args.rows.shape[0] : args.topk_weights_recv.shape[0];
  DeviceExchange exchange(context, launcher, args, num_rows / ranks);
  MOIRE_RETURN_IF_ERROR(exchange.begin());
  for_each_kernel([&]<int N, class From, class To>(DType from, DType to) {
    if (!is_for(args, from, to) || takes_vectors(args) != (N > 1)) return;
    const Summed<From, To> summed{
        .tokens = tokens_of(exchange, places),
        .rows = matrix_of<const From>(args.rows),
        .y = matrix_of<To>(y),
        .pieces = y.is_present() ? static_cast<uint32_t>(y.columns() / N) : 0,
        .choices = choices_of(args.topk_idx, args.num_experts, ranks),
        .weights_recv = matrix_of<const float>(args.topk_weights_recv),
        .weights = matrix_of<float>(args.topk_weights)};
    const uint32_t blocks =
        std::min(blocks_for(places.shape[0], kMovingWarps), exchange.most_blocks());
    launcher.launch(sum_kernel<N, From, To>, {blocks, kThreads}, summed, launcher.reporter());
  });
  return exchange.end();
}

std::string policy(const DeviceState&, const CombineArgs& args) {
  return concat("a warp per token, ", takes_vectors(args) ? "16 bytes" : "an element", " of ",
                kRanksAtOnce, " ranks' rows at ", kPiecesAtOnce,
                " places per thread at once; a launch to meet before and after");
}

}  // namespace

// It runs without an element to write as well: others wait for this rank.
const Implementation<CombineArgs> kCombine = {
    "cuda", Device::kCuda, supports_everything, no_workspace, policy, run, launches_of_call, true};

cudaError_t load_combine() {
  cudaError_t error = cudaSuccess;
  for_each_kernel([&]<int N, class From, class To>(DType, DType) {
    if (error == cudaSuccess) error = load(sum_kernel<N, From, To>);
  });
  return error;
}

}  // namespace moire::cuda::ops
