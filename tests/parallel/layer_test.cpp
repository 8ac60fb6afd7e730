// A layer whose experts are spread over ranks against the same layer on one rank with the tokens of
// all: bit for bit where sums are in one order (each token has at most one choice at a rank, rank
// by rank), the same terms in another order elsewhere.
#include <moire/grouped_mlp.h>
#include <moire/routing.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "reference/number.h"
#include "tests/ops/routing_support.h"
#include "tests/parallel/ranks.h"

namespace moire::test {
namespace {

constexpr int64_t kWidth = 24;
constexpr DType kFP32 = DType::kFP32;

// Experts on tokens that are there, forward and backward: what a layer does on any rank.
struct Experts {
  Experts(const TestTensor& w1_, const TestTensor& w2_, int64_t num_tokens, int64_t k)
      : w1(w1_),
        w2(w2_),
        num_groups(w1.view().shape[0]),
        hidden(w1.view().shape[2]),
        capacity(num_tokens * k),
        offsets(DType::kInt64, {num_groups + 1}),
        gather_idx(DType::kInt32, {capacity}),
        scatter_idx(DType::kInt32, {num_tokens, k}),
        probs(kFP32, {capacity}),
        z(kFP32, {capacity, 2 * kWidth}),
        rows(kFP32, {capacity, hidden}),
        grad_rows(kFP32, {capacity, hidden}),
        grad_probs(kFP32, {capacity}),
        grad_w1(kFP32, {num_groups, 2 * kWidth, hidden}),
        grad_w2(kFP32, {num_groups, hidden, kWidth}) {}

  Status plan(const Context& context, const TensorView& topk_idx, const TensorView& topk_weights) {
    PermutePlanArgs args;
    args.topk_idx = topk_idx;
    args.num_groups = num_groups;
    args.offsets = offsets;
    args.gather_idx = gather_idx;
    args.scatter_idx = scatter_idx;
    Status status = run(Tested(context), args);
    if (!status.ok()) return status;
    groups = Groups(offsets.as<int64_t>(), num_groups, capacity);
    PermuteArgs permuted;
    permuted.topk_weights = topk_weights;
    permuted.scatter_idx = scatter_idx;
    permuted.probs = probs;
    permuted.groups = groups;
    return moire::permute(context, permuted);
  }
  Status forward(const Context& context, const TensorView& x, const TensorView& y) {
    GroupedMlpArgs args;
    fill(args, x);
    args.y = rows;
    Status status = run(Tested(context), args);
    return status.ok() ? sum(context, rows, y) : status;
  }
  Status backward(const Context& context, const TensorView& x, const TensorView& grad_y,
                  const TensorView& grad_x, const TensorView& grad_topk_weights) {
    GroupedMlpBackwardArgs args;
    fill(args, x);
    args.gathered_grad_y = 1;
    args.grad_y = grad_y;
    args.grad_x = grad_rows;
    args.grad_probs = grad_probs;
    args.grad_w1 = Weight(grad_w1);
    args.grad_w2 = Weight(grad_w2);
    Status status = run(Tested(context), args);
    return status.ok() ? sum(context, grad_rows, grad_x, grad_topk_weights) : status;
  }
  // Rows back to tokens, and the gradients of probs to their choices.
  Status sum(const Context& context, const TensorView& from, const TensorView& to,
             const TensorView& grad_topk_weights = {}) {
    UnpermuteArgs args;
    args.rows = from;
    args.scatter_idx = scatter_idx;
    args.y = to;
    if (grad_topk_weights.is_present()) args.probs = grad_probs;
    args.topk_weights = grad_topk_weights;
    return moire::unpermute(context, args);
  }
  template <class A>
  void fill(A& args, const TensorView& x) {
    args.x = x;
    args.row_idx = gather_idx;
    args.w1 = Weight(w1);
    args.w2 = Weight(w2);
    args.probs = probs;
    args.groups = groups;
    args.z = z;
  }

  TestTensor w1, w2;
  int64_t num_groups, hidden, capacity;
  TestTensor offsets, gather_idx, scatter_idx, probs, z, rows, grad_rows, grad_probs, grad_w1,
      grad_w2;
  Groups groups;
};

// What a layer gives the tokens of one rank.
struct Results {
  explicit Results(const TensorView& x, int64_t k)
      : y(kFP32, {x.shape[0], x.shape[1]}),
        grad_x(kFP32, {x.shape[0], x.shape[1]}),
        grad_topk_weights(kFP32, {x.shape[0], k}) {}
  TestTensor y, grad_x, grad_topk_weights;
};

// Rows first ... of a tensor, as a tensor of its own.
TestTensor part(const TestTensor& all, int64_t first, int64_t count) {
  const TensorView from = all.view();
  TestTensor out = from.rank == 3 ? TestTensor(kFP32, {count, from.shape[1], from.shape[2]})
                                  : TestTensor(from.type(), {count, from.shape[1]});
  const int64_t row = out.view().num_bytes() / std::max<int64_t>(count, 1);
  if (count > 0) {
    std::memcpy(out.view().data, static_cast<const std::byte*>(from.data) + first * row,
                static_cast<size_t>(count * row));
  }
  return out;
}

class Layers {
 public:
  explicit Layers(const RoutingOptions& options)
      : routed_(options, random_),
        num_tokens_(std::accumulate(options.tokens.begin(), options.tokens.end(), int64_t{0})),
        w1_(kFP32, {options.num_experts(), 2 * kWidth, options.hidden}),
        w2_(kFP32, {options.num_experts(), options.hidden, kWidth}),
        x_(kFP32, {num_tokens_, options.hidden}),
        grad_y_(kFP32, {num_tokens_, options.hidden}),
        topk_idx_(options.index_type, {num_tokens_, options.k}),
        topk_weights_(kFP32, {num_tokens_, options.k}),
        alone_(x_, options.k),
        experts_(std::make_unique<Experts>(w1_.randomize(random_, 0.2), w2_.randomize(random_, 0.2),
                                           num_tokens_, options.k)) {
    grad_y_.randomize(random_);
    int64_t row = 0;
    for (const auto& tokens : routed_.tokens) {
      first_.push_back(row);
      for (int64_t t = 0; t < tokens->x.view().shape[0]; ++t, ++row) {
        for (int64_t h = 0; h < options.hidden; ++h) x_.set(row, h, tokens->x.get(t, h));
        for (int64_t j = 0; j < options.k; ++j) {
          set_index(topk_idx_, row, j, reference::read_index(tokens->topk_idx, t, j));
          topk_weights_.set(row, j, tokens->topk_weights.get(t, j));
        }
      }
      results_.emplace_back(tokens->x, options.k);
    }
    const int64_t rows = options.ranks() * options.room();
    back_ = routed_.ranks.take(kFP32, rows, options.hidden);
    for (int rank = 0; rank < options.ranks(); ++rank) {
      const int64_t first = rank * options.local_experts;
      local_.push_back(std::make_unique<Experts>(part(w1_, first, options.local_experts),
                                                 part(w2_, first, options.local_experts), rows,
                                                 options.k));
    }
  }

  void run_alone() {
    const Context context = cpu(2);
    ASSERT_TRUE(succeeds(experts_->plan(context, topk_idx_, topk_weights_)));
    ASSERT_TRUE(succeeds(experts_->forward(context, x_, alone_.y)));
    ASSERT_TRUE(succeeds(
        experts_->backward(context, x_, grad_y_, alone_.grad_x, alone_.grad_topk_weights)));
  }
  void run_spread() {
    routed_.ranks.succeed(
        [&](int rank, const Tested& tested) { return run_rank(rank, tested.context()); });
  }

  const Routed& routed() const { return routed_; }
  // The part of `of` that has the tokens of a rank.
  TestTensor tokens_of(const TestTensor& of, int rank) const {
    const auto at = static_cast<size_t>(rank);
    return part(of, first_[at], routed_.options.tokens[at]);
  }
  int64_t first_row(int rank) const { return first_[static_cast<size_t>(rank)]; }
  const Results& spread(int rank) const { return results_[static_cast<size_t>(rank)]; }
  const Results& alone() const { return alone_; }
  const Experts& experts() const { return *experts_; }
  const Experts& local(int rank) const { return *local_[static_cast<size_t>(rank)]; }

 private:
  Status run_rank(int rank, const Context& context) {
    const Ranks& ranks = routed_.ranks;
    Experts& local = *local_[static_cast<size_t>(rank)];
    Results& results = results_[static_cast<size_t>(rank)];
    const TensorView back = ranks.in(rank, back_);
    const TensorView weights = ranks.in(rank, routed_.topk_weights_recv);
    if (Status s = moire::dispatch(context, routed_.dispatch(rank)); !s.ok()) return s;
    if (Status s = local.plan(context, ranks.in(rank, routed_.topk_idx_recv), weights); !s.ok()) {
      return s;
    }
    // The copy that the backward reads: the next dispatch overwrites x_recv.
    const TestTensor x = copy_of(ranks.in(rank, routed_.x_recv));
    if (Status s = local.forward(context, x, back); !s.ok()) return s;
    CombineArgs combined = routed_.combine(rank, results.y, {});
    combined.rows = back;
    combined.topk_idx = combined.topk_weights_recv = {};
    if (Status s = moire::combine(context, combined); !s.ok()) return s;
    // The gradient of combine is dispatch, that of dispatch combine.
    const TestTensor grad_y = tokens_of(grad_y_, rank);
    DispatchArgs dispatched = routed_.dispatch(rank);
    dispatched.x = grad_y;
    dispatched.topk_idx = dispatched.topk_weights = {};
    dispatched.topk_idx_recv = dispatched.topk_weights_recv = {};
    if (Status s = moire::dispatch(context, dispatched); !s.ok()) return s;
    if (Status s = local.backward(context, x, dispatched.x_recv, back, weights); !s.ok()) return s;
    combined = routed_.combine(rank, results.grad_x, results.grad_topk_weights);
    combined.rows = back;
    return moire::combine(context, combined);
  }
  static TestTensor copy_of(const TensorView& t) {
    TestTensor out(kFP32, {t.shape[0], t.shape[1]});
    std::memcpy(out.view().data, t.data, static_cast<size_t>(t.num_bytes()));
    return out;
  }

  Random random_;
  Routed routed_;
  int64_t num_tokens_;
  TestTensor w1_, w2_, x_, grad_y_, topk_idx_, topk_weights_;
  Results alone_;
  std::unique_ptr<Experts> experts_;
  std::vector<int64_t> first_;
  std::vector<Results> results_;
  std::vector<std::unique_ptr<Experts>> local_;
  size_t back_ = 0;
};

RoutingOptions layer_options(int ranks) {
  RoutingOptions options;
  options.device = Device::kCpu;
  for (int rank = 0; rank < ranks; ++rank) options.tokens.push_back(rank == 1 ? 0 : 5 + rank % 4);
  options.local_experts = 3;
  options.hidden = 32;
  return options;
}

TEST(SpreadLayer, HasTheBitsOfOneRankWhereSumsAreInOneOrder) {
  for (const int ranks : {1, 2, 3, 8, 16}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    RoutingOptions options = layer_options(ranks);
    options.k = std::min(ranks, 4);
    options.one_each = true;
    Layers layers(options);
    layers.run_alone();
    layers.run_spread();
    const Results& alone = layers.alone();
    for (int rank = 0; rank < ranks; ++rank) {
      const Results& got = layers.spread(rank);
      EXPECT_TRUE(same_bits(got.y, layers.tokens_of(alone.y, rank)));
      EXPECT_TRUE(same_bits(got.grad_x, layers.tokens_of(alone.grad_x, rank)));
      EXPECT_TRUE(
          same_bits(got.grad_topk_weights, layers.tokens_of(alone.grad_topk_weights, rank)));
      const int64_t first = rank * options.local_experts;
      const Experts &local = layers.local(rank), &all = layers.experts();
      EXPECT_TRUE(same_bits(local.grad_w1, part(all.grad_w1, first, options.local_experts)));
      EXPECT_TRUE(same_bits(local.grad_w2, part(all.grad_w2, first, options.local_experts)));
    }
    EXPECT_TRUE(layers.routed().ranks.are_undamaged());
  }
}

// Any routing: gradients of weights still have one rank's bits, and so have those of the choices'
// weights; y and grad_x are the same terms in another order.
TEST(SpreadLayer, AddsTheSameTermsForAnyRouting) {
  for (const int ranks : {2, 8, 16}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    RoutingOptions options = layer_options(ranks);
    options.k = 6;
    options.drops = true;
    Layers layers(options);
    layers.run_alone();
    layers.run_spread();
    const Experts& all = layers.experts();
    for (int rank = 0; rank < ranks; ++rank) {
      const Results& got = layers.spread(rank);
      const int64_t first = rank * options.local_experts;
      const Experts& local = layers.local(rank);
      EXPECT_TRUE(same_bits(local.grad_w1, part(all.grad_w1, first, options.local_experts)));
      EXPECT_TRUE(same_bits(local.grad_w2, part(all.grad_w2, first, options.local_experts)));
      EXPECT_TRUE(same_bits(got.grad_topk_weights,
                            layers.tokens_of(layers.alone().grad_topk_weights, rank)));
      const int64_t before = layers.first_row(rank);
      for (int64_t t = 0; t < got.y.view().shape[0]; ++t) {
        for (int64_t h = 0; h < options.hidden; ++h) {
          // k terms, as they lie in expert order, in either order of summation.
          double magnitude_y = 0, magnitude_x = 0;
          for (int64_t j = 0; j < options.k; ++j) {
            const int64_t row = reference::read_index(all.scatter_idx, before + t, j);
            if (row < 0) continue;
            magnitude_y += std::abs(all.rows.get(row, h));
            magnitude_x += std::abs(all.grad_rows.get(row, h));
          }
          EXPECT_NEAR(got.y.get(t, h), layers.alone().y.get(before + t, h),
                      2 * reference::dot_tolerance(options.k, magnitude_y));
          EXPECT_NEAR(got.grad_x.get(t, h), layers.alone().grad_x.get(before + t, h),
                      2 * reference::dot_tolerance(options.k, magnitude_x));
        }
      }
    }
  }
}

}  // namespace
}  // namespace moire::test
