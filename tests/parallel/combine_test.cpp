// combine: the ranks' rows of a token, added in the order of the ranks; and the gradients that it
// and dispatch are of each other.
#include <cmath>

#include "reference/expert_parallel.h"
#include "tests/ops/routing_support.h"
#include "tests/parallel/ranks.h"

namespace moire::test {
namespace {

// What experts left in every row of the windows that a token has: random numbers.
void fill_rows(const Routed& routed, Random& random) {
  for (int s = 0; s < routed.ranks.size(); ++s) {
    for (int64_t t = 0; t < routed.options.tokens[static_cast<size_t>(s)]; ++t) {
      for (int d = 0; d < routed.ranks.size(); ++d) {
        const int64_t i = routed.row(s, t, d);
        if (i < 0) continue;
        for (int64_t h = 0; h < routed.options.hidden; ++h) {
          reference::write_element(routed.ranks.in(d, routed.x_recv), i, h, random.normal());
        }
        for (int64_t j = 0; j < routed.options.k; ++j) {
          reference::write_element(routed.ranks.in(d, routed.topk_weights_recv), i, j,
                                   random.normal());
        }
      }
    }
  }
}

// The results of one rank.
struct Combined {
  Combined(const Routed& routed, int rank, DType dtype, int64_t padding = 0)
      : y(dtype, {routed.options.tokens[static_cast<size_t>(rank)], routed.options.hidden},
          padding),
        topk_weights(DType::kFP32, {y.view().shape[0], routed.options.k}, padding) {}
  TestTensor y, topk_weights;
};

std::vector<Combined> combine_all(const Routed& routed, DType dtype, int64_t padding = 0) {
  std::vector<Combined> out;
  for (int rank = 0; rank < routed.ranks.size(); ++rank) {
    out.emplace_back(routed, rank, dtype, padding);
  }
  routed.ranks.succeed([&](int rank, const Tested& context) {
    const Combined& results = out[static_cast<size_t>(rank)];
    return test::combine(context, routed.combine(rank, results.y, results.topk_weights));
  });
  return out;
}

std::vector<TensorView> rows_of(const Routed& routed) {
  std::vector<TensorView> rows;
  for (int d = 0; d < routed.ranks.size(); ++d) rows.push_back(routed.ranks.in(d, routed.x_recv));
  return rows;
}

// Each choice has the weight of its token's row at the rank of its expert.
void expect_weights(const Routed& routed, int rank, const TestTensor& topk_weights) {
  const Tokens& tokens = routed.of(rank);
  for (int64_t t = 0; t < topk_weights.view().shape[0]; ++t) {
    for (int64_t j = 0; j < routed.options.k; ++j) {
      const int64_t expert = reference::read_index(tokens.topk_idx, t, j);
      const auto owner = static_cast<int>(expert / routed.options.local_experts);
      const bool is_routed = expert >= 0 && owner < routed.ranks.size();
      const int64_t i = is_routed ? routed.row(rank, t, owner) : -1;
      const double want =
          i < 0 ? 0
                : reference::read_element(routed.ranks.in(owner, routed.topk_weights_recv), i, j);
      EXPECT_EQ(topk_weights.get(t, j), want) << "token " << t << ", choice " << j;
    }
  }
}

// To the bit: FP32 sums in the order of the ranks, rounded once.
void expect_sums(const Routed& routed, int rank, const TestTensor& y) {
  const std::vector<TensorView> rows = rows_of(routed);
  TestTensor want = y;
  for (int64_t t = 0; t < y.view().shape[0]; ++t) {
    for (int64_t h = 0; h < routed.options.hidden; ++h) {
      float sum = 0;
      bool is_first = true;
      for (int d = 0; d < routed.ranks.size(); ++d) {
        const int64_t i = routed.row(rank, t, d);
        if (i < 0) continue;
        const auto term =
            static_cast<float>(reference::read_element(rows[static_cast<size_t>(d)], i, h));
        sum = is_first ? term : sum + term;
        is_first = false;
      }
      want.set(t, h, static_cast<double>(sum));
    }
  }
  EXPECT_TRUE(same_bits(y, want));
}

TEST(Combine, AddsTheRanksRowsInOrderInFp32AndRoundsOnce) {
  Random random;
  for (const int64_t ranks : {1, 2, 3, 8, 16}) {
    for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
      for (const bool widens : {false, true}) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, " << dtype_name(dtype));
        RoutingOptions o;
        for (int64_t r = 0; r < ranks; ++r) o.tokens.push_back(random.integer(0, 12));
        o.tokens.back() = 9;
        o.k = random.integer(1, 9);
        o.dtype = dtype;
        o.hidden = random.integer(1, 150);
        o.padding = widens ? 3 : 0;
        o.drops = widens;
        o.capacity = random.integer(0, 2) == 0 ? 4 : 0;
        const Routed routed(o, random);
        fill_rows(routed, random);
        const std::vector<Combined> got =
            combine_all(routed, widens ? DType::kFP32 : dtype, widens ? 2 : 0);
        for (int rank = 0; rank < routed.ranks.size(); ++rank) {
          const Combined& results = got[static_cast<size_t>(rank)];
          expect_sums(routed, rank, results.y);
          EXPECT_TRUE(matches(results.y,
                              reference::combine(routed.of(rank).places, rows_of(routed), rank)));
          expect_weights(routed, rank, results.topk_weights);
          EXPECT_TRUE(results.y.is_undamaged() && results.topk_weights.is_undamaged());
        }
        EXPECT_TRUE(routed.ranks.are_undamaged());
      }
    }
  }
}

TEST(Combine, IsTheSameForAnyNumberOfThreadsAndAnyTiming) {
  RoutingOptions o;
  o.tokens = {200, 0, 170};
  o.capacity = 150;
  o.k = 4;
  std::vector<std::vector<Combined>> runs;
  const Random seed;  // prints it
  for (const int num_threads : {1, 3, 0}) {
    Random random;  // the same numbers each time
    const Routed routed(o, random, 20'000, num_threads);
    fill_rows(routed, random);
    runs.push_back(combine_all(routed, DType::kFP32));
  }
  for (size_t i = 1; i < runs.size(); ++i) {
    for (size_t rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(same_bits(runs[i][rank].y, runs[0][rank].y));
      EXPECT_TRUE(same_bits(runs[i][rank].topk_weights, runs[0][rank].topk_weights));
    }
  }
}

// <dispatch(x), g> = <x, combine(g)> over all ranks, for numbers whose sums are exact; the same of
// the weights. So each is the other's gradient.
TEST(Combine, IsTheGradientOfDispatch) {
  Random random;
  RoutingOptions o;
  o.tokens = {12, 0, 7, 15};
  o.k = 3;
  o.drops = true;
  o.capacity = 9;
  Routed routed(o, random);
  for (const auto& tokens : routed.tokens) {
    for (int64_t t = 0; t < tokens->x.view().shape[0]; ++t) {
      for (int64_t h = 0; h < o.hidden; ++h) {
        tokens->x.set(t, h, static_cast<double>(random.integer(-8, 8)));
      }
      for (int64_t j = 0; j < o.k; ++j) {
        tokens->topk_weights.set(t, j, static_cast<double>(random.integer(-8, 8)));
      }
    }
  }
  routed.ranks.succeed([&](int rank, const Tested& context) {
    DispatchArgs args = routed.dispatch(rank);
    args.overflow = MOIRE_OVERFLOW_DROP;
    return test::dispatch(context, args);
  });
  // g of each row that was sent, in its place; what was received is summed up before.
  double received = 0, sent = 0;
  for (int s = 0; s < 4; ++s) {
    for (int64_t t = 0; t < o.tokens[static_cast<size_t>(s)]; ++t) {
      for (int d = 0; d < 4; ++d) {
        const int64_t i = routed.row(s, t, d);
        if (i < 0) continue;
        for (const auto& [tensor, columns] :
             {std::pair{routed.x_recv, o.hidden}, {routed.topk_weights_recv, o.k}}) {
          const TensorView view = routed.ranks.in(d, tensor);
          for (int64_t c = 0; c < columns; ++c) {
            const auto g = static_cast<double>(random.integer(-8, 8));
            received += g * reference::read_element(view, i, c);
            reference::write_element(view, i, c, g);
          }
        }
      }
    }
  }
  const std::vector<Combined> grads = combine_all(routed, DType::kFP32);
  for (int s = 0; s < 4; ++s) {
    const Combined& grad = grads[static_cast<size_t>(s)];
    for (int64_t t = 0; t < grad.y.view().shape[0]; ++t) {
      for (int64_t h = 0; h < o.hidden; ++h) sent += routed.of(s).x.get(t, h) * grad.y.get(t, h);
      for (int64_t j = 0; j < o.k; ++j) {
        sent += routed.of(s).topk_weights.get(t, j) * grad.topk_weights.get(t, j);
      }
    }
  }
  EXPECT_EQ(received, sent);
}

TEST(Combine, GivesTokensThatWentNowhereZeros) {
  Random random;
  RoutingOptions o;
  o.tokens = {3, 3};
  Routed routed(o, random);
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t j = 0; j < o.k; ++j)
      set_index(routed.tokens[1]->topk_idx, t, j, t - 1 < 0 ? -1 : 8);
  }
  ASSERT_TRUE(succeeds(routed.tokens[1]->plan(Tested(cpu(1)), 3)));
  fill_rows(routed, random);
  const std::vector<Combined> got = combine_all(routed, DType::kFP32);
  const TestTensor zeros = TestTensor(DType::kFP32, {3, o.hidden}).fill(0);
  EXPECT_TRUE(same_bits(got[1].y, zeros));
  expect_weights(routed, 1, got[1].topk_weights);
}

TEST(Combine, NamesWhatIsWrong) {
  Random random;
  RoutingOptions o;
  o.device = Device::kCpu;
  o.tokens = {3, 4};
  o.dtype = DType::kBF16;
  const Routed routed(o, random);
  const Context context = routed.ranks.context(0);
  const Combined results(routed, 0, DType::kFP16);
  CombineArgs args = routed.combine(0, results.y, results.topk_weights);
  EXPECT_TRUE(fails(moire::combine(context, args), Code::kInvalidArgument,
                    "combine: y is fp16 [3, 40] but rows is bf16 [8, 40]: y must have the dtype of "
                    "rows, or fp32"));
  args.rows = args.y = {};
  args.topk_weights_recv = args.topk_idx = args.topk_weights = {};
  EXPECT_TRUE(fails(moire::combine(context, args), Code::kInvalidArgument,
                    "combine: there is nothing to do: rows and y, or topk_weights_recv to "
                    "topk_weights, must be present"));
}

}  // namespace
}  // namespace moire::test
