// permute on the CPU: whole rows are copied, each by the task that owns its place in the output;
// the weights are scattered by token.
#include <algorithm>
#include <cstring>

#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"
#include "core/format.h"

namespace moire::cpu {
namespace {

template <class Index>
void permute_rows(ThreadPool& pool, const PermuteArgs& args) {
  const TensorView x = args.x, rows = args.rows;
  const int64_t bytes = bytes_per_row(rows), used = rows_in_use(args.groups);
  if (bytes == 0) return;
  const auto* gather_idx = static_cast<const Index*>(args.gather_idx.data);
  for_ranges(pool, used, items_per_task(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(row_bytes_of(rows, i), row_bytes_of(x, gather_idx[i]),
                  static_cast<size_t>(bytes));
    }
  });
  if (args.tail == MOIRE_TAIL_ZERO) zero_rows_from(pool, rows, used);
}

template <class Index>
void permute_probs(ThreadPool& pool, const PermuteArgs& args) {
  const TensorView weights = args.topk_weights, scatter_idx = args.scatter_idx;
  const int64_t topk = weights.shape[1];
  float* probs = row_of<float>(args.probs, 0);
  const int64_t per_task = items_per_task(bytes_per_row(weights));
  for_ranges(pool, topk == 0 ? 0 : weights.shape[0], per_task, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Index* rows = row_of<const Index>(scatter_idx, t);
      const float* from = row_of<const float>(weights, t);
      for (int64_t j = 0; j < topk; ++j) {
        if (rows[j] >= 0) probs[rows[j]] = from[j];
      }
    }
  });
  if (args.tail == MOIRE_TAIL_UNTOUCHED) return;
  std::fill(probs + rows_in_use(args.groups), probs + args.probs.shape[0], 0.0F);
}

std::string policy(const DeviceState& state, const PermuteArgs& args) {
  const TensorView rows = args.rows;
  if (!rows.is_present()) return concat("scatter by token, ", state.num_threads, " threads");
  return concat("copy, ", items_per_task(bytes_per_row(rows)), " rows per task, ",
                state.num_threads, " threads");
}

Status run(const Context& context, const PermuteArgs& args) {
  ThreadPool& pool = *context.state().pool;
  if (is_present(args.rows)) {
    with_index_type(TensorView(args.gather_idx).type(),
                    [&]<class Index>() { permute_rows<Index>(pool, args); });
  }
  if (is_present(args.probs)) {
    with_index_type(TensorView(args.scatter_idx).type(),
                    [&]<class Index>() { permute_probs<Index>(pool, args); });
  }
  return {};
}

}  // namespace

const Implementation<PermuteArgs> kPermute = {
    "cpu", Device::kCpu, supports_everything<PermuteArgs>, no_workspace<PermuteArgs>, policy, run};

}  // namespace moire::cpu
