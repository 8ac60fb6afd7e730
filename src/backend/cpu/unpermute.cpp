// unpermute and its gradient on the CPU. A task owns whole tokens, so every sum has one owner and
// one order: top-k entries ascending. Main paths: SumEntries and BackwardToken.
#include <algorithm>
#include <cmath>

#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/simd_targets.h"
#include "core/format.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/unpermute.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/convert-inl.h"
#include "backend/cpu/lane_sums-inl.h"
#include "backend/cpu/sum_entries-inl.h"

#ifndef MOIRE_UNPERMUTE_TOPK_ENTRIES
#define MOIRE_UNPERMUTE_TOPK_ENTRIES
namespace moire::cpu {
namespace {

// Where one token's top-k entries went, and their weights: what sum_entries-inl.h sums.
template <class Index>
struct TopkEntries {
  TopkEntries(const TensorView& scatter_idx, const TensorView& weights_, int64_t token,
              const TensorView& source_ = {})
      : rows(row_of<const Index>(scatter_idx, token)),
        weights(weights_.is_present() ? row_of<const float>(weights_, token) : nullptr),
        count(scatter_idx.shape[1]),
        source(source_.data),
        stride(source_.stride()) {}

  // The first entry at or after j that was not dropped; count if there is none.
  int64_t next(int64_t j) const {
    while (j < count && rows[j] < 0) ++j;
    return j;
  }
  float weight(int64_t j) const { return weights == nullptr ? 1.0F : weights[j]; }
  template <class Element>
  const Element* row(int64_t j) const {
    return static_cast<const Element*>(source) + rows[j] * stride;
  }

  const Index* rows;     // [count]; -1 = dropped
  const float* weights;  // [count], or null (= 1)
  int64_t count;
  const void* source;  // whose rows they are
  int64_t stride;
};

}  // namespace
}  // namespace moire::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

// to[0 ... n) = weight * from[0 ... n)
template <class Format>
HWY_INLINE void StoreScaled(float weight, const float* from, size_t n,
                            typename Format::Element* to) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  const auto w = hn::Set(d, weight);
  size_t c = 0;
  for (; c + lanes <= n; c += lanes) {
    Format::Store(d, hn::Mul(w, hn::LoadU(d, from + c)), to + c);
  }
  for (; c < n; ++c) to[c] = Format::encode(weight * from[c]);
}

// Both gradients go by segments of the token's row and, within one, by entries: k rows at a time
// keep the memory busier than one after the other (1.3 x, 8 entries of 2048 columns in BF16, two
// cores), but reading k and writing k at once is slower than one after the other again.

// grad_rows = weight * grad_y
template <class Grad, class Index>
void RowGradients(const TensorView& grad_rows, const TopkEntries<Index>& entries,
                  const typename Grad::Element* grad_y) {
  using Element = typename Grad::Element;
  const auto columns = static_cast<size_t>(grad_rows.shape[1]);
  alignas(64) float segment[kSegment];
  for (size_t c = 0; c < columns; c += kSegment) {
    const size_t n = std::min(kSegment, columns - c);
    DecodeRun<Grad>(grad_y + c, n, segment);
    for (int64_t j = entries.next(0); j < entries.count; j = entries.next(j + 1)) {
      StoreScaled<Grad>(entries.weight(j), segment, n,
                        row_of<Element>(grad_rows, entries.rows[j]) + c);
    }
  }
}

// grad_weights = rows . grad_y
template <class Grad, class Row, class Index>
void WeightGradients(const TensorView& rows, const TopkEntries<Index>& entries,
                     const typename Grad::Element* grad_y, float* grad_weights) {
  using Element = const typename Row::Element;
  const auto columns = static_cast<size_t>(rows.shape[1]);
  alignas(64) float segment[kSegment];
  std::fill_n(grad_weights, entries.count, 0.0F);
  for (size_t c = 0; c < columns; c += kSegment) {
    const size_t n = std::min(kSegment, columns - c);
    DecodeRun<Grad>(grad_y + c, n, segment);
    PadSegment(segment, n);
    for (int64_t j = entries.next(0); j < entries.count; j = entries.next(j + 1)) {
      grad_weights[j] +=
          DotStoredSegment<Row>(row_of<Element>(rows, entries.rows[j]) + c, segment, n);
    }
  }
}

void SumTokens(const UnpermuteArgs& args, int64_t begin, int64_t end) {
  const TensorView rows = args.rows, y = args.y, scatter_idx = args.scatter_idx;
  with_format(rows.type(), [&](auto from) HWY_ATTR {
    using From = decltype(from);
    with_index_type(scatter_idx.type(), [&]<class Index>() HWY_ATTR {
      for (int64_t t = begin; t < end; ++t) {
        const TopkEntries<Index> entries(scatter_idx, args.weights, t, rows);
        SumEntries<From>(entries, y, t);
      }
    });
  });
}

template <class Grad, class Index>
void BackwardToken(const UnpermuteBackwardArgs& args, int64_t token) {
  const TopkEntries<Index> entries(args.scatter_idx, args.weights, token);
  const auto* grad_y = row_of<const typename Grad::Element>(args.grad_y, token);
  if (is_present(args.grad_rows)) RowGradients<Grad>(args.grad_rows, entries, grad_y);
  if (!is_present(args.grad_weights)) return;
  const TensorView rows = args.rows;
  with_format(rows.type(), [&](auto row) HWY_ATTR {
    WeightGradients<Grad, decltype(row)>(rows, entries, grad_y,
                                         row_of<float>(args.grad_weights, token));
  });
}

void BackwardTokens(const UnpermuteBackwardArgs& args, int64_t begin, int64_t end) {
  with_format(TensorView(args.grad_y).type(), [&](auto grad) HWY_ATTR {
    with_index_type(TensorView(args.scatter_idx).type(), [&]<class Index>() HWY_ATTR {
      for (int64_t t = begin; t < end; ++t) BackwardToken<decltype(grad), Index>(args, t);
    });
  });
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moire::cpu {
namespace {

HWY_EXPORT(SumTokens);
HWY_EXPORT(BackwardTokens);

// topk_weights = probs of the row that each top-k entry went to, 0 where it was dropped.
template <class Index>
void gather_weights(ThreadPool& pool, const UnpermuteArgs& args) {
  const TensorView scatter_idx = args.scatter_idx, topk_weights = args.topk_weights;
  const float* probs = row_of<const float>(args.probs, 0);
  const int64_t per_task = items_per_task(bytes_per_row(topk_weights));
  for_ranges(pool, scatter_idx.shape[0], per_task, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Index* rows = row_of<const Index>(scatter_idx, t);
      float* to = row_of<float>(topk_weights, t);
      for (int64_t j = 0; j < scatter_idx.shape[1]; ++j)
        to[j] = rows[j] < 0 ? 0.0F : probs[rows[j]];
    }
  });
}

// Tokens of one task, by the bytes of the rows they touch.
int64_t tokens_per_task(const TensorView& scatter_idx, const TensorView& token_rows) {
  return items_per_task((scatter_idx.shape[1] + 1) * bytes_per_row(token_rows));
}

std::string policy(const DeviceState& state, const UnpermuteArgs& args) {
  if (!is_present(args.y)) return concat("gather by token, ", state.num_threads, " threads");
  return concat("sum by token, ", tokens_per_task(args.scatter_idx, args.y), " tokens per task, ",
                state.num_threads, " threads, ", state.simd);
}

std::string backward_policy(const DeviceState& state, const UnpermuteBackwardArgs& args) {
  return concat("scatter by token, ", tokens_per_task(args.scatter_idx, args.grad_y),
                " tokens per task, ", state.num_threads, " threads, ", state.simd);
}

Status run(const Context& context, const UnpermuteArgs& args) {
  ThreadPool& pool = *context.state().pool;
  const TensorView scatter_idx = args.scatter_idx;
  if (is_present(args.y)) {
    for_ranges(pool, scatter_idx.shape[0], tokens_per_task(scatter_idx, args.y),
               [&](int64_t begin, int64_t end) {
                 HWY_DYNAMIC_DISPATCH(SumTokens)(args, begin, end);
               });
  }
  if (is_present(args.topk_weights)) {
    with_index_type(scatter_idx.type(), [&]<class Index>() { gather_weights<Index>(pool, args); });
  }
  return {};
}

Status run_backward(const Context& context, const UnpermuteBackwardArgs& args) {
  ThreadPool& pool = *context.state().pool;
  const TensorView scatter_idx = args.scatter_idx, grad_rows = args.grad_rows;
  for_ranges(pool, scatter_idx.shape[0], tokens_per_task(scatter_idx, args.grad_y),
             [&](int64_t begin, int64_t end) {
               HWY_DYNAMIC_DISPATCH(BackwardTokens)(args, begin, end);
             });
  if (grad_rows.is_present() && args.tail == MOIRE_TAIL_ZERO) {
    zero_rows_from(pool, grad_rows, rows_in_use(args.groups));
  }
  return {};
}

}  // namespace

const Implementation<UnpermuteArgs> kUnpermute = {
    "cpu",  Device::kCpu, supports_everything<UnpermuteArgs>, no_workspace<UnpermuteArgs>,
    policy, run};
const Implementation<UnpermuteBackwardArgs> kUnpermuteBackward = {
    "cpu",
    Device::kCpu,
    supports_everything<UnpermuteBackwardArgs>,
    no_workspace<UnpermuteBackwardArgs>,
    backward_policy,
    run_backward};

}  // namespace moire::cpu
#endif
