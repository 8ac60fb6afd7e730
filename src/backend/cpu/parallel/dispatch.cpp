// dispatch on the CPU: each token's row is copied into the windows of the ranks that it goes to, by
// the task that owns the token.
#include <algorithm>
#include <cstring>

#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"
#include "core/format.h"
#include "core/status_macros.h"
#include "parallel/exchange.h"

namespace moire::cpu {
namespace {

// A tensor of this rank's window as it lies in another's: its rows that are for this rank's tokens.
class Target {
 public:
  Target(const Exchange& exchange, const TensorView& own, int rank)
      : view_(own), first_(own.shape[0] / exchange.size() * exchange.rank()) {
    view_.data = exchange.at(rank, own);
  }
  template <class T>
  T* row(int64_t place) const {
    return row_of<T>(view_, first_ + place);
  }
  void copy(const TensorView& from, int64_t token, int64_t place) const {
    if (bytes_per_row(from) == 0) return;
    std::memcpy(row_bytes_of(view_, first_ + place), row_bytes_of(from, token),
                static_cast<size_t>(bytes_per_row(from)));
  }

 private:
  TensorView view_;
  int64_t first_;
};

// Tokens begin ... end - 1: their rows, with scales, to one rank.
void send_rows(const Exchange& exchange, const DispatchArgs& args, int rank, int64_t begin,
               int64_t end) {
  const Target rows(exchange, args.x_recv, rank), scales(exchange, args.x_scales_recv, rank);
  for (int64_t t = begin; t < end; ++t) {
    const int32_t place = row_of<const int32_t>(args.places, t)[rank];
    if (place < 0) continue;
    rows.copy(args.x, t, place);
    if (is_present(args.x_scales)) scales.copy(args.x_scales, t, place);
  }
}

// Their choices and weights, as that rank numbers its experts.
template <class Index>
void send_choices(const Exchange& exchange, const DispatchArgs& args, int rank, int64_t begin,
                  int64_t end) {
  const TensorView topk_idx = args.topk_idx;
  const int64_t local = args.num_experts / exchange.size(), first = rank * local;
  const Target choices(exchange, args.topk_idx_recv, rank);
  const Target weights(exchange, args.topk_weights_recv, rank);
  for (int64_t t = begin; t < end; ++t) {
    const int32_t place = row_of<const int32_t>(args.places, t)[rank];
    if (place < 0) continue;
    const Index* expert = row_of<const Index>(topk_idx, t);
    const float* weight = row_of<const float>(args.topk_weights, t);
    int32_t* const to = choices.row<int32_t>(place);
    float* const to_weight = weights.row<float>(place);
    for (int64_t j = 0; j < topk_idx.shape[1]; ++j) {
      const bool is_theirs = expert[j] >= first && expert[j] < first + local;
      to[j] = is_theirs ? static_cast<int32_t>(expert[j] - first) : -1;
      to_weight[j] = is_theirs ? weight[j] : 0.0F;
    }
  }
}

// Rows of one rank that no token of this one has: no choices.
void clear_choices(const Exchange& exchange, const DispatchArgs& args, int rank) {
  const TensorView places = args.places, received = args.topk_idx_recv;
  const Target choices(exchange, received, rank), weights(exchange, args.topk_weights_recv, rank);
  int64_t used = 0;
  for (int64_t t = 0; t < places.shape[0]; ++t) used += row_of<int32_t>(places, t)[rank] >= 0;
  for (int64_t place = used; place < received.shape[0] / exchange.size(); ++place) {
    std::fill_n(choices.row<int32_t>(place), received.shape[1], -1);
    std::fill_n(weights.row<float>(place), received.shape[1], 0.0F);
  }
}

// The first rank for which this one has more tokens than there is room for.
Excess excess_of(const DispatchArgs& args, int64_t room) {
  if (args.overflow != MOIRE_OVERFLOW_REFUSE) return {};
  const int64_t* const counts = row_of<const int64_t>(args.counts, 0);
  for (int64_t d = 0; d < args.counts.shape[0]; ++d) {
    if (counts[d] > room) return {counts[d], d, room};
  }
  return {};
}

int64_t num_rows(const DispatchArgs& args) {
  return is_present(args.x_recv) ? args.x_recv.shape[0] : args.topk_idx_recv.shape[0];
}

int64_t tokens_per_task(const DispatchArgs& args) {
  return items_per_task(args.places.shape[1] * bytes_per_row(args.x));
}

std::string policy(const DeviceState& state, const DispatchArgs& args) {
  return concat("copy by token, ", tokens_per_task(args), " tokens per task, ", state.num_threads,
                " threads");
}

Status run(const Context& context, const DispatchArgs& args) {
  const int64_t num_tokens = args.places.shape[0];
  Exchange exchange(context, args);
  MOIRE_RETURN_IF_ERROR(exchange.begin(excess_of(args, num_rows(args) / exchange.size())));
  ThreadPool& pool = *context.state().pool;
  for_ranges(pool, num_tokens, tokens_per_task(args), [&](int64_t begin, int64_t end) {
    for (int rank = 0; rank < exchange.size(); ++rank) {
      if (is_present(args.x)) send_rows(exchange, args, rank, begin, end);
      if (!is_present(args.topk_idx)) continue;
      with_index_type(TensorView(args.topk_idx).type(), [&]<class Index>() {
        send_choices<Index>(exchange, args, rank, begin, end);
      });
    }
  });
  if (TensorView(args.topk_idx).columns() > 0) {
    pool.parallel_for(exchange.size(), [&](int64_t rank, int) {
      clear_choices(exchange, args, static_cast<int>(rank));
    });
  }
  return exchange.end();
}

}  // namespace

// It runs without an element to write as well: others wait for this rank.
const Implementation<DispatchArgs> kDispatch = {"cpu",
                                                Device::kCpu,
                                                supports_everything<DispatchArgs>,
                                                no_workspace<DispatchArgs>,
                                                policy,
                                                run,
                                                nullptr,
                                                true};

}  // namespace moire::cpu
