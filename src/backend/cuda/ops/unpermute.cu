// unpermute on CUDA: a block takes whole tokens and first puts those of their choices that have a
// row into shared memory; then a thread takes 16 bytes of a row at a time (or one element) and the
// rows of 4 choices at once, which are added in order of choice. The weights' gradient is gathered
// by a thread per choice, in a second launch where both are asked for.
#include <algorithm>

#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/shared.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = 256;
constexpr int kChoicesAtOnce = 4;
// Pieces of y that a block makes, about, and choices that it can hold.
constexpr int64_t kPiecesPerBlock = 4 * kThreads;
constexpr int64_t kMaxChoices = 2048;

struct Choice {
  int64_t row;   // -1: past the token's last
  float weight;  // then -0, which times zero and added changes no bit
};

template <class From, class To>
struct Operands {
  Matrix<const From> rows;
  int64_t num_rows;
  Indices scatter_idx;
  Matrix<const float> weights;  // or absent
  Matrix<To> y;
  int64_t num_tokens;
  int64_t k;
  uint32_t pieces;  // of a row
  uint32_t tokens_per_block;

  // Choices of a token in shared memory.
  __host__ __device__ uint32_t padded_choices() const {
    return static_cast<uint32_t>(round_up(k, kChoicesAtOnce));
  }
};

// By a warp: a token's choices that have a row, in their order, then of those past the last.
template <class From, class To>
__device__ void load_choices(const Operands<From, To>& args, int64_t token, Choice* choices,
                             const Reporter& reporter) {
  const uint32_t lane = threadIdx.x % kWarp, padded = args.padded_choices();
  uint32_t count = 0;
  for (int64_t first = 0; first < args.k; first += kWarp) {
    const int64_t j = first + lane;
    const int64_t row = j < args.k ? checked_index(args.scatter_idx, token * args.k + j,
                                                   args.scatter_idx.at(token, j), args.num_rows,
                                                   Dropping::kAllowed, reporter)
                                   : -1;
    const uint32_t found = __ballot_sync(kAllLanes, row >= 0);
    const uint32_t before = __popc(found & ((1U << lane) - 1));
    const bool is_weighted = row >= 0 && args.weights.is_present();
    const float weight = is_weighted ? args.weights.row(token)[j] : 1.0F;
    if (row >= 0) choices[count + before] = {row, weight};
    count += __popc(found);
  }
  for (uint32_t i = count + lane; i < padded; i += kWarp) choices[i] = {-1, -0.0F};
}

// Adds the rows of a few choices to sum, all loads under way before the first addition.
template <int N, class From>
__device__ void add_choices(const Matrix<const From>& rows, const Choice* choices, uint32_t column,
                            float (&sum)[N]) {
  Packed<From, N> piece[kChoicesAtOnce];
#pragma unroll
  for (int j = 0; j < kChoicesAtOnce; ++j) {
    const int64_t row = choices[j].row;
    piece[j] = {};
    if (row >= 0) piece[j] = load<N>(rows.row(row) + column);
  }
#pragma unroll
  for (int j = 0; j < kChoicesAtOnce; ++j) {
    const float weight = choices[j].weight;
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = fmaf(weight, piece[j][i], sum[i]);
  }
}

template <int N, class From, class To>
__global__ void __launch_bounds__(kThreads, 4)
    sum_kernel(Operands<From, To> args, Reporter reporter) {
  Choice* const choices = dynamic_shared<Choice>();
  const int64_t first_token = int64_t{blockIdx.x} * args.tokens_per_block;
  const uint32_t padded = args.padded_choices();
  for (uint32_t i = threadIdx.x / kWarp; i < args.tokens_per_block; i += kThreads / kWarp) {
    if (first_token + i >= args.num_tokens) break;
    load_choices(args, first_token + i, choices + i * padded, reporter);
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < args.tokens_per_block * args.pieces; i += kThreads) {
    const int64_t token = first_token + i / args.pieces;
    const uint32_t column = i % args.pieces * N;
    if (token >= args.num_tokens) return;
    const Choice* const own = choices + i / args.pieces * padded;
    float sum[N];  // -0, so that the first choice keeps the sign of its zeros
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] = -0.0F;
    uint32_t first = 0;
    for (; first < padded && own[first].row >= 0; first += kChoicesAtOnce) {
      add_choices(args.rows, own + first, column, sum);
    }
    Packed<To, N> y;
#pragma unroll
    for (int j = 0; j < N; ++j) y.set(j, first > 0 ? sum[j] : 0.0F);
    store(args.y.row(token) + column, y);
  }
}

struct WeightGather {
  const float* probs;
  int64_t num_rows;
  Indices scatter_idx;
  Matrix<float> topk_weights;
  int64_t num_choices;
  uint32_t k;
};

__global__ void __launch_bounds__(kThreads) gather_kernel(WeightGather args, Reporter reporter) {
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread >= args.num_choices) return;
  const int64_t token = thread / args.k, choice = thread % args.k;
  const int64_t row = checked_index(args.scatter_idx, thread, args.scatter_idx.at(token, choice),
                                    args.num_rows, Dropping::kAllowed, reporter);
  args.topk_weights.row(token)[choice] = row < 0 ? 0.0F : args.probs[row];
}

// Calls f.operator()<N>(Operands<From, To>) for the types and the alignment of a call.
template <class F>
decltype(auto) with_types(const UnpermuteArgs& args, F&& f) {
  const TensorView rows(args.rows), y(args.y);
  const int64_t k = args.scatter_idx.shape[1];
  const auto of = [&]<int N, class From, class To>() {
    const int64_t pieces = y.columns() / N;
    const int64_t per_block = std::min(kPiecesPerBlock / std::max<int64_t>(1, pieces),
                                       kMaxChoices / std::max<int64_t>(1, k));
    return f.template operator()<N>(Operands<From, To>{
        .rows = matrix_of<const From>(rows),
        .num_rows = rows.num_rows(),
        .scatter_idx = indices_of(args.scatter_idx, "scatter_idx"),
        .weights = matrix_of<const float>(args.weights),
        .y = matrix_of<To>(y),
        .num_tokens = y.num_rows(),
        .k = k,
        .pieces = static_cast<uint32_t>(pieces),
        .tokens_per_block = static_cast<uint32_t>(std::max<int64_t>(1, per_block))});
  };
  return with_float_type(rows.type(), [&]<class From>() {
    constexpr int kN = kVector<From>;
    const bool is_vector = opens_vectors({rows, y}) && y.columns() % kN == 0;
    if (y.type() != rows.type()) {
      return is_vector ? of.template operator()<kN, From, float>()
                       : of.template operator()<1, From, float>();
    }
    return is_vector ? of.template operator()<kN, From, From>()
                     : of.template operator()<1, From, From>();
  });
}

Status run(const Context& context, const UnpermuteArgs& args) {
  Launcher launcher(context, "unpermute");
  if (args.y.rank != 0) {
    with_types(args, [&]<int N, class From, class To>(const Operands<From, To>& operands) {
      const uint32_t blocks = blocks_for(operands.num_tokens, operands.tokens_per_block);
      const size_t choices = size_t{operands.tokens_per_block} * operands.padded_choices();
      launcher.launch(sum_kernel<N, From, To>, {blocks, kThreads, choices * sizeof(Choice)},
                      operands, launcher.reporter());
    });
  }
  if (args.topk_weights.rank != 0) {
    const TensorView topk_weights(args.topk_weights), probs(args.probs);
    const WeightGather gather{.probs = vector_of<const float>(probs),
                              .num_rows = probs.columns(),
                              .scatter_idx = indices_of(args.scatter_idx, "scatter_idx"),
                              .topk_weights = matrix_of<float>(topk_weights),
                              .num_choices = topk_weights.num_elements(),
                              .k = static_cast<uint32_t>(topk_weights.columns())};
    launcher.launch(gather_kernel, {blocks_for(gather.num_choices, kThreads), kThreads}, gather,
                    launcher.reporter());
  }
  return launcher.status();
}

Reason supports(const DeviceState&, const UnpermuteArgs& args) {
  const int64_t k = args.scatter_idx.shape[1];
  if (k <= kMaxChoices) return std::nullopt;
  return concat(k, " choices per token, at most ", kMaxChoices, " are taken");
}

std::string policy(const DeviceState&, const UnpermuteArgs& args) {
  if (args.y.rank == 0) return "a thread per choice";
  return with_types(args, [&]<int N>(const auto& operands) {
    return concat(operands.tokens_per_block, " tokens per block of ", kThreads, " threads, ", N,
                  " columns and ", kChoicesAtOnce, " choices at once",
                  args.topk_weights.rank != 0 ? ", weights in a second launch" : "");
  });
}

int64_t launches(const DeviceState&, const UnpermuteArgs& args) {
  return is_present(args.y) + is_present(args.topk_weights);
}

}  // namespace

const Implementation<UnpermuteArgs> kUnpermute = on_cuda(supports, policy, run, launches);

}  // namespace moire::cuda::ops
