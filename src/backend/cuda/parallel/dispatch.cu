// dispatch on CUDA: a warp takes a token, reads its row once and stores it at every rank that it
// goes to, 16 bytes per thread where alignment allows it; then scales, choices and weights. Blocks
// of their own, a quarter of all at most, clear the choices of rows that no token has.
#include <algorithm>

#include "backend/cuda/implementations.h"
#include "backend/cuda/parallel/moved_tokens.cuh"
#include "core/format.h"
#include "core/status_macros.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = kMovingWarps * kWarp;
constexpr int kAtOnce = 4;  // pieces of a row that a thread has under way

// Rows of x or of its scales, and this rank's own tensor of those that it receives.
struct Rows {
  const std::byte* from;
  std::byte* to;
  int64_t from_stride, to_stride;  // bytes
  uint32_t pieces, piece_bytes;    // 16, or an element's
};

struct Sent {
  Tokens tokens;
  Rows rows, scales;
  Choices choices;
  Matrix<const float> weights;
  Matrix<int32_t> idx_recv;
  Matrix<float> weights_recv;
  uint32_t clearing_blocks;
};

template <class Piece>
__device__ void send_pieces(const Tokens& tokens, const Rows& rows, int64_t token) {
  const Ranks& ranks = tokens.ranks;
  const auto* const from = reinterpret_cast<const Piece*>(rows.from + token * rows.from_stride);
  for (uint32_t first = threadIdx.x % kWarp; first < rows.pieces; first += kAtOnce * kWarp) {
    Piece loaded[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i * kWarp < rows.pieces) loaded[i] = from[first + i * kWarp];
    }
    for (int i = 1; i <= ranks.size; ++i) {  // each rank begins with another
      const int d = ranks.rank + i < ranks.size ? ranks.rank + i : ranks.rank + i - ranks.size;
      const int64_t row = tokens.row(token, d);
      if (row < 0) continue;
      auto* const to = reinterpret_cast<Piece*>(ranks.at(d, rows.to + row * rows.to_stride));
#pragma unroll
      for (uint32_t p = 0; p < kAtOnce; ++p) {
        if (first + p * kWarp < rows.pieces) to[first + p * kWarp] = loaded[p];
      }
    }
  }
}

__device__ void send(const Tokens& tokens, const Rows& rows, int64_t token) {
  if (rows.piece_bytes == 16) return send_pieces<uint4>(tokens, rows, token);
  if (rows.piece_bytes == 4) return send_pieces<uint32_t>(tokens, rows, token);
  if (rows.piece_bytes == 2) return send_pieces<uint16_t>(tokens, rows, token);
  send_pieces<uint8_t>(tokens, rows, token);
}

// A token's choices as each rank numbers its experts, with their weights.
__device__ void send_choices(const Sent& sent, int64_t token, const Reporter& reporter) {
  const Tokens& tokens = sent.tokens;
  for (int64_t j = threadIdx.x % kWarp; j < sent.choices.k; j += kWarp) {
    const int64_t expert = sent.choices.expert(token, j, reporter);
    const float weight = sent.weights.row(token)[j];
    for (int d = 0; d < tokens.ranks.size; ++d) {
      const int64_t row = tokens.row(token, d);
      if (row < 0) continue;
      const int64_t local = expert - d * sent.choices.local_experts;
      const bool is_theirs = expert >= 0 && local >= 0 && local < sent.choices.local_experts;
      *tokens.ranks.at(d, sent.idx_recv.row(row) + j) =
          is_theirs ? static_cast<int32_t>(local) : -1;
      *tokens.ranks.at(d, sent.weights_recv.row(row) + j) = is_theirs ? weight : 0.0F;
    }
  }
}

// By a block: rows of rank d that no token of this one has.
__device__ void clear_choices(const Sent& sent, int d) {
  const Tokens& tokens = sent.tokens;
  int64_t used = 0;
  for (int64_t base = 0; base < tokens.count; base += kThreads) {
    const int64_t token = base + threadIdx.x;
    used += __syncthreads_count(token < tokens.count && tokens.row(token, d) >= 0);
  }
  const int64_t k = sent.choices.k, first = tokens.ranks.rank * tokens.room + used;
  for (int64_t i = threadIdx.x; i < (tokens.room - used) * k; i += kThreads) {
    const int64_t row = first + i / k, j = i % k;
    *tokens.ranks.at(d, sent.idx_recv.row(row) + j) = -1;
    *tokens.ranks.at(d, sent.weights_recv.row(row) + j) = 0.0F;
  }
}

__global__ void __launch_bounds__(kThreads, 2) send_kernel(Sent sent, Reporter reporter) {
  if (*sent.tokens.goes == 0) return;
  if (blockIdx.x < sent.clearing_blocks) {
    const auto blocks = static_cast<int>(sent.clearing_blocks);
    for (auto d = static_cast<int>(blockIdx.x); d < sent.tokens.ranks.size; d += blocks) {
      clear_choices(sent, d);
    }
    return;
  }
  const uint32_t block = blockIdx.x - sent.clearing_blocks;
  const uint32_t blocks = gridDim.x - sent.clearing_blocks;
  for (int64_t token = block * kMovingWarps + threadIdx.x / kWarp; token < sent.tokens.count;
       token += int64_t{blocks} * kMovingWarps) {
    sent.tokens.check(token, reporter);
    send_choices(sent, token, reporter);
    send(sent.tokens, sent.scales, token);
    send(sent.tokens, sent.rows, token);
  }
}

Rows rows_of(const TensorView& from, const TensorView& to) {
  const int64_t size = from.is_present() ? dtype_size(from.type()) : 1;
  const int64_t row_bytes = from.columns() * size;
  const bool is_vector = opens_vectors({from, to}) && row_bytes % kVectorBytes == 0;
  const int64_t piece = is_vector ? kVectorBytes : size;
  return {.from = static_cast<const std::byte*>(from.data),
          .to = static_cast<std::byte*>(to.data),
          .from_stride = from.stride() * size,
          .to_stride = to.stride() * size,
          .pieces = static_cast<uint32_t>(row_bytes / piece),
          .piece_bytes = static_cast<uint32_t>(piece)};
}

Status run(const Context& context, const DispatchArgs& args) {
  Launcher launcher(context, "dispatch");
  const TensorView places(args.places), topk_idx(args.topk_idx);
  const int64_t ranks = places.shape[1];
  const int64_t num_rows =
      is_present(args.x_recv) ? args.x_recv.shape[0] : args.topk_idx_recv.shape[0];
  const bool refuses = args.overflow == MOIRE_OVERFLOW_REFUSE;
  DeviceExchange exchange(context, launcher, args, num_rows / ranks,
                          refuses ? vector_of<const int64_t>(args.counts) : nullptr);
  MOIRE_RETURN_IF_ERROR(exchange.begin());
  const uint32_t most = exchange.most_blocks(), most_clearing = std::max(most / 4, 1U);
  const Sent sent{.tokens = tokens_of(exchange, places),
                  .rows = rows_of(args.x, args.x_recv),
                  .scales = rows_of(args.x_scales, args.x_scales_recv),
                  .choices = choices_of(topk_idx, args.num_experts, ranks),
                  .weights = matrix_of<const float>(args.topk_weights),
                  .idx_recv = matrix_of<int32_t>(args.topk_idx_recv),
                  .weights_recv = matrix_of<float>(args.topk_weights_recv),
                  .clearing_blocks = topk_idx.columns() == 0
                                         ? 0
                                         : std::min(static_cast<uint32_t>(ranks), most_clearing)};
  const uint32_t blocks =
      std::min(blocks_for(sent.tokens.count, kMovingWarps), most - sent.clearing_blocks);
  launcher.launch(send_kernel, {sent.clearing_blocks + blocks, kThreads}, sent,
                  launcher.reporter());
  return exchange.end();
}

std::string policy(const DeviceState&, const DispatchArgs& args) {
  return concat("a warp per token, ", rows_of(args.x, args.x_recv).piece_bytes,
                " bytes per thread, stored at each rank; a launch to meet before and after");
}

}  // namespace

// It runs without an element to write as well: others wait for this rank.
const Implementation<DispatchArgs> kDispatch = {
    "cuda", Device::kCuda, supports_everything, no_workspace, policy, run, launches_of_call, true};

cudaError_t load_dispatch() { return load(send_kernel); }

}  // namespace moire::cuda::ops
