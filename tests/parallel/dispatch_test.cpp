// dispatch_plan and dispatch: every token arrives once at each rank of its experts, and nothing
// else is written.
#include <algorithm>
#include <cstring>
#include <limits>

#include "reference/expert_parallel.h"
#include "tests/ops/routing_support.h"
#include "tests/parallel/ranks.h"

namespace moire::test {
namespace {

// Of calls that the CPU refuses: a device does not read values before it runs.
RoutingOptions two_ranks() {
  RoutingOptions options;
  options.device = Device::kCpu;
  options.tokens = {9, 4};
  return options;
}

// Of rank 0's tokens, by the tested device, for as many ranks as there are numbers of tokens.
void expect_plan_of_definition(const RoutingOptions& options, int64_t capacity, Random& random) {
  Tokens tokens(options, 0, random);
  ASSERT_TRUE(succeeds(tokens.plan(tested(), capacity)));
  DispatchPlanArgs args;
  args.topk_idx = tokens.topk_idx;
  args.num_experts = tokens.num_experts;
  args.capacity = capacity;
  args.places = tokens.places;
  const reference::DispatchPlanResults want = reference::dispatch_plan(args);
  EXPECT_TRUE(same_indices(tokens.places, want.places));
  EXPECT_TRUE(same_indices(tokens.counts, want.counts));
  EXPECT_TRUE(tokens.places.is_undamaged() && tokens.counts.is_undamaged());
}

TEST(DispatchPlan, EqualsTheDefinition) {
  Random random;
  for (const int64_t ranks : {1, 2, 3, 8, 16}) {
    for (const int64_t k : {1, 2, 8, 32}) {
      for (const int64_t capacity : {0, 1, 7, 40}) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, k " << k << ", capacity " << capacity);
        RoutingOptions options;
        options.tokens.assign(static_cast<size_t>(ranks), random.integer(0, 30));
        options.k = k;
        options.local_experts = random.integer(1, 5);
        options.index_type = random.integer(0, 1) == 0 ? DType::kInt32 : DType::kInt64;
        options.padding = random.integer(0, 3);
        options.drops = true;
        expect_plan_of_definition(options, capacity, random);
      }
    }
  }
}

// Those that a GPU's blocks share out, each several times over; more ranks than a warp has lanes.
TEST(DispatchPlan, EqualsTheDefinitionOfManyTokensAndRanks) {
  Random random;
  for (const int64_t ranks : {1, 2, 32, 33, 100}) {
    for (const int64_t tokens : {256, 257, 511, 4096, 4097, 20'000}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, " << tokens << " tokens");
      RoutingOptions options;
      options.tokens.assign(static_cast<size_t>(ranks), tokens);
      options.k = random.integer(1, 9);
      options.hidden = 1;
      options.index_type = random.integer(0, 1) == 0 ? DType::kInt32 : DType::kInt64;
      options.drops = true;
      expect_plan_of_definition(options, random.integer(tokens / 2, tokens), random);
    }
  }
}

TEST(DispatchPlan, PlacesTheFirstTokensAndCountsAll) {
  RoutingOptions options;
  options.tokens = {4, 4};
  options.local_experts = 2;
  Random random;
  Tokens tokens(options, 0, random);
  const int64_t choices[4][2] = {{0, 3}, {1, 0}, {-1, 4}, {2, 1}};
  for (int64_t t = 0; t < 4; ++t) {
    for (int64_t j = 0; j < 2; ++j) set_index(tokens.topk_idx, t, j, choices[t][j]);
  }
  ASSERT_TRUE(succeeds(tokens.plan(tested(), 2)));
  EXPECT_TRUE(same_indices(tokens.places, {0, 0, 1, -1, -1, -1, -1, 1}));
  EXPECT_TRUE(same_indices(tokens.counts, {3, 2}));
}

TEST(DispatchPlan, NamesWhatIsWrong) {
  RoutingOptions options;
  options.tokens = {4, 4};
  Random random;
  Tokens tokens(options, 0, random);
  tokens.num_experts = 9;
  EXPECT_TRUE(fails(tokens.plan(tested(), 2), Code::kInvalidArgument,
                    "dispatch_plan: num_experts is 9, must be a multiple of the 2 ranks"));
  tokens.num_experts = 8;
  EXPECT_TRUE(fails(tokens.plan(tested(), -1), Code::kInvalidArgument,
                    "dispatch_plan: capacity is -1, must be 0 to 2147483647"));
  set_index(tokens.topk_idx, 2, 1, 9);
  EXPECT_TRUE(fails(tokens.plan(cpu(), 2), Code::kInvalidArgument,
                    "dispatch_plan: topk_idx[2, 1] is 9, must be -1 to 8"));
}

const std::byte* row_of(const TensorView& t, int64_t row) {
  return static_cast<const std::byte*>(t.data) + row * t.stride() * dtype_size(t.type());
}

bool same_row(const TensorView& a, int64_t i, const TensorView& b, int64_t j) {
  return std::memcmp(row_of(a, i), row_of(b, j),
                     static_cast<size_t>(a.columns() * dtype_size(a.type()))) == 0;
}

bool is_poison(const TensorView& t, int64_t row) {
  const std::byte* first = row_of(t, row);
  return std::all_of(first, first + t.columns() * dtype_size(t.type()),
                     [](std::byte b) { return b == std::byte{0xFF}; });
}

// Row i of what `receiver` has is row t of rank s's x, with the choices that are the receiver's
// own.
void expect_row(const Routed& routed, int receiver, int64_t i, int s, int64_t t) {
  SCOPED_TRACE(testing::Message() << "row " << i << " of rank " << receiver << ": token " << t
                                  << " of rank " << s);
  const Tokens& sent = routed.of(s);
  EXPECT_TRUE(same_row(routed.ranks.in(receiver, routed.x_recv), i, sent.x, t));
  const TensorView idx = routed.ranks.in(receiver, routed.topk_idx_recv);
  const TensorView weights = routed.ranks.in(receiver, routed.topk_weights_recv);
  for (int64_t j = 0; j < routed.options.k; ++j) {
    const int64_t expert = reference::read_index(sent.topk_idx, t, j);
    const int64_t local = expert - receiver * routed.options.local_experts;
    const bool is_own = expert < sent.num_experts && local >= 0 && expert >= 0 &&
                        local < routed.options.local_experts;
    EXPECT_EQ(reference::read_index(idx, i, j), is_own ? local : -1);
    EXPECT_EQ(reference::read_element(weights, i, j), is_own ? sent.topk_weights.get(t, j) : 0);
  }
}

void expect_all_arrived(const Routed& routed) {
  const int64_t room = routed.options.room();
  for (int d = 0; d < routed.ranks.size(); ++d) {
    std::vector<bool> was_sent(static_cast<size_t>(routed.ranks.size() * room));
    for (int s = 0; s < routed.ranks.size(); ++s) {
      for (int64_t t = 0; t < routed.options.tokens[static_cast<size_t>(s)]; ++t) {
        const int64_t i = routed.row(s, t, d);
        if (i < 0) continue;
        was_sent[static_cast<size_t>(i)] = true;
        expect_row(routed, d, i, s, t);
      }
    }
    const TensorView weights = routed.ranks.in(d, routed.topk_weights_recv);
    for (int64_t i = 0; i < routed.ranks.size() * room; ++i) {
      if (was_sent[static_cast<size_t>(i)]) continue;
      EXPECT_TRUE(is_poison(routed.ranks.in(d, routed.x_recv), i)) << "row " << i;
      EXPECT_TRUE(is_poison(routed.ranks.in(d, routed.topk_idx_recv), i)) << "not -1 in row " << i;
      for (int64_t j = 0; j < routed.options.k; ++j) {
        EXPECT_EQ(reference::read_element(weights, i, j), 0);
      }
    }
  }
  EXPECT_TRUE(routed.ranks.are_undamaged()) << "written beside the tensors of a window";
}

RoutingOptions random_options(Random& random, int64_t ranks) {
  RoutingOptions o;
  for (int64_t r = 0; r < ranks; ++r) {
    o.tokens.push_back(random.integer(0, 3) == 0 ? 0 : random.integer(1, 25));
  }
  o.tokens[0] = std::max<int64_t>(o.tokens[0], 1);
  o.k = random.integer(0, 3) == 0 ? 32 : random.integer(1, 8);
  o.local_experts = random.integer(1, 6);
  o.hidden = random.integer(1, 3) * 40;
  o.dtype = random.integer(0, 1) == 0   ? DType::kBF16
            : random.integer(0, 1) == 0 ? DType::kFP16
                                        : DType::kFP32;
  o.index_type = random.integer(0, 1) == 0 ? DType::kInt32 : DType::kInt64;
  o.padding = random.integer(0, 2) * 4;
  o.drops = random.integer(0, 1) == 0;
  return o;
}

TEST(Dispatch, BringsEveryTokenOnceToEachRankOfItsExperts) {
  Random random;
  for (const int64_t ranks : {1, 2, 3, 8, 16}) {
    for (int i = 0; i < 4; ++i) {
      const Routed routed(random_options(random, ranks), random, 20'000, i == 0 ? 0 : i);
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      routed.ranks.succeed([&](int rank, const Tested& context) {
        return test::dispatch(context, routed.dispatch(rank));
      });
      expect_all_arrived(routed);
    }
  }
}

TEST(Dispatch, TakesRanksWithoutTokensAndRoutingToOneRankAlone) {
  Random random;
  RoutingOptions options;
  options.tokens = {0, 9, 0};
  Routed routed(options, random);
  Tokens& sender = *routed.tokens[1];
  for (int64_t t = 0; t < 9; ++t) {
    for (int64_t j = 0; j < options.k; ++j) set_index(sender.topk_idx, t, j, 8 + j);
  }
  ASSERT_TRUE(succeeds(sender.plan(Tested(cpu(1)), options.room())));
  routed.ranks.succeed([&](int rank, const Tested& context) {
    return test::dispatch(context, routed.dispatch(rank));
  });
  expect_all_arrived(routed);
  EXPECT_TRUE(same_indices(sender.counts, {0, 0, 9}));
}

// What a captured step does: the same tensors, again and again, with other data.
TEST(Dispatch, MayBeCalledAgainAtOnce) {
  Random random;
  RoutingOptions options;
  options.tokens = {7, 12, 3, 9};
  const Routed routed(options, random);
  routed.ranks.succeed([&](int rank, const Tested& context) -> Status {
    for (int i = 0; i < 100; ++i) {
      if (Status status = test::dispatch(context, routed.dispatch(rank)); !status.ok()) {
        return status;
      }
    }
    return {};
  });
  expect_all_arrived(routed);
}

TEST(Dispatch, CarriesQuantizedRowsWithTheirScales) {
  Random random;
  for (const DType scale_type : {DType::kE8M0, DType::kFP32}) {
    RoutingOptions options;
    options.tokens = {7, 0, 12};
    options.dtype = DType::kE4M3;
    options.hidden = 160;
    const int64_t blocks = scale_type == DType::kE8M0 ? 5 : 2;
    Routed routed(options, random);
    const size_t scales_recv = routed.ranks.take(scale_type, 3 * 12, blocks, 2);
    std::vector<TestTensor> scales;
    for (const int64_t tokens : options.tokens) {
      scales.emplace_back(scale_type, std::initializer_list<int64_t>{tokens, blocks});
      random_bytes(scales.back(), random);
    }
    const auto with_scales = [&](int rank) {
      DispatchArgs args = routed.dispatch(rank);
      args.x_scales = scales[static_cast<size_t>(rank)];
      args.x_scales_recv = routed.ranks.in(rank, scales_recv);
      return args;
    };
    routed.ranks.succeed([&](int rank, const Tested& context) {
      return test::dispatch(context, with_scales(rank));
    });
    expect_all_arrived(routed);
    for (int s = 0; s < 3; ++s) {
      for (int64_t t = 0; t < options.tokens[static_cast<size_t>(s)]; ++t) {
        for (int d = 0; d < 3; ++d) {
          const int64_t i = routed.row(s, t, d);
          if (i < 0) continue;
          EXPECT_TRUE(
              same_row(routed.ranks.in(d, scales_recv), i, scales[static_cast<size_t>(s)], t));
        }
      }
    }
    DispatchArgs lacking = routed.dispatch(0);
    EXPECT_TRUE(fails(test::dispatch(routed.ranks.tested(0), lacking), Code::kInvalidArgument,
                      "but x_scales is absent, needs its e8m0 or fp32 scales"));
  }
}

TEST(Dispatch, DropsTokensWithoutAPlaceWhereTheCallerSaysSo) {
  Random random;
  RoutingOptions options;
  options.tokens = {30, 30, 5};
  options.capacity = 6;
  const Routed routed(options, random);
  routed.ranks.succeed([&](int rank, const Tested& context) {
    DispatchArgs args = routed.dispatch(rank);
    args.overflow = MOIRE_OVERFLOW_DROP;
    args.counts = {};
    return test::dispatch(context, args);
  });
  expect_all_arrived(routed);
}

TEST(Dispatch, IsRefusedOnAllRanksWhereOneHasMoreTokensThanThereIsRoomFor) {
  Random random;
  RoutingOptions options;
  options.tokens = {3, 30, 5};
  options.capacity = 6;
  Routed routed(options, random);
  for (int64_t t = 0; t < 30; ++t) {
    set_index(routed.tokens[1]->topk_idx, t, 0, 9);  // rank 2's, for all 30
    set_index(routed.tokens[1]->topk_idx, t, 1, 10);
  }
  ASSERT_TRUE(succeeds(routed.tokens[1]->plan(Tested(cpu(1)), 6)));
  int32_t overflow = MOIRE_OVERFLOW_REFUSE;
  const auto call = [&](int rank, const Tested& context) {
    DispatchArgs args = routed.dispatch(rank);
    args.overflow = overflow;
    return test::dispatch(context, args);
  };
  for (const Status& status : routed.ranks.run(call)) {
    EXPECT_TRUE(fails(status, Code::kInvalidArgument,
                      "dispatch: rank 1 has 30 tokens for rank 2, which has room for 6 of each "
                      "rank; nothing was moved"));
  }
  for (int d = 0; d < 3; ++d) {
    for (int64_t i = 0; i < 18; ++i) EXPECT_TRUE(is_poison(routed.ranks.in(d, routed.x_recv), i));
  }
  overflow = MOIRE_OVERFLOW_DROP;
  // They are in step, and go on.
  routed.ranks.succeed(call);
  expect_all_arrived(routed);
}

// Rows alone have no experts, whatever num_experts says.
TEST(Dispatch, AndCombineOfRowsAloneDoNotCompareExperts) {
  Random random;
  RoutingOptions options;
  options.tokens = {6, 3};
  const Routed routed(options, random);
  routed.ranks.succeed([&](int rank, const Tested& context) -> Status {
    DispatchArgs there;
    there.x = routed.of(rank).x;
    there.places = routed.of(rank).places;
    there.overflow = MOIRE_OVERFLOW_DROP;
    there.num_experts = 2 * rank;
    there.x_recv = routed.ranks.in(rank, routed.x_recv);
    if (Status status = run(context, there); !status.ok()) return status;
    const TensorView x = routed.of(rank).x;
    const TestTensor y(x.type(), {x.shape[0], x.shape[1]});
    CombineArgs back;
    back.rows = there.x_recv;
    back.places = there.places;
    back.num_experts = 2 * rank;
    back.y = y;
    return run(context, back);
  });
}

TEST(Dispatch, IsOfOneRankWithoutACommunicator) {
  Random random;
  RoutingOptions options;
  options.tokens = {11};
  options.drops = true;
  const Routed routed(options, random);
  ASSERT_TRUE(succeeds(test::dispatch(tested(2), routed.dispatch(0))));
  expect_all_arrived(routed);
  DispatchArgs args = routed.dispatch(0);
  const TestTensor anywhere(DType::kFP32, {11, options.hidden});
  args.x_recv = anywhere;
  EXPECT_TRUE(succeeds(test::dispatch(tested(1), args)));
}

TEST(Dispatch, RefusesPlacesThatAreNoPlan) {
  Random random;
  const Routed routed(two_ranks(), random);
  const auto refusal = [&](int64_t t, int64_t d, int32_t place) {
    TestTensor places = routed.of(0).places;
    set_index(places, t, d, place);
    DispatchArgs args = routed.dispatch(0);
    args.places = places;
    return moire::dispatch(routed.ranks.context(0), args).message();
  };
  EXPECT_EQ(refusal(0, 1, 9), "dispatch: places[0, 1] is 9, must be -1 to 8");
  EXPECT_EQ(refusal(3, 0, std::numeric_limits<int32_t>::min()),
            "dispatch: places[3, 0] is -2147483648, must be -1 to 8");
  EXPECT_NE(
      refusal(0, 0, 8).find("dispatch: places[0, 0] is 8 but 0 tokens before it go to rank 0"),
      std::string::npos);
}

// A plan for less room than the window has would drop tokens that nobody agreed to drop.
TEST(Dispatch, RefusesCountsOfAPlanForOtherRoom) {
  Random random;
  RoutingOptions options = two_ranks();
  options.k = 8;  // all tokens go to both ranks, or nearly so
  const Routed routed(options, random);
  ASSERT_TRUE(succeeds(routed.tokens[0]->plan(Tested(cpu(1)), 2)));
  const std::string count = std::to_string(reference::read_index(routed.of(0).counts, 0, 0));
  EXPECT_TRUE(fails(moire::dispatch(routed.ranks.context(0), routed.dispatch(0)),
                    Code::kInvalidArgument,
                    "dispatch: counts[0] is " + count +
                        " but places has 2 tokens for rank 0, which has room for 9, must be as "
                        "dispatch_plan made them for that room"));
}

TEST(Dispatch, RefusesIndicesOutOfRangeAndWritesNothing) {
  Random random;
  const Routed routed(two_ranks(), random);
  for (const int64_t wrong : {int64_t{-2}, int64_t{9}, int64_t{1} << 40}) {
    TestTensor topk_idx = routed.of(0).topk_idx;
    set_index(topk_idx, 5, 1, wrong);
    DispatchArgs args = routed.dispatch(0);
    args.topk_idx = topk_idx;
    EXPECT_TRUE(
        fails(moire::dispatch(routed.ranks.context(0), args), Code::kInvalidArgument,
              "dispatch: topk_idx[5, 1] is " + std::to_string(wrong) + ", must be -1 to 8"));
  }
  for (int d = 0; d < 2; ++d) {
    EXPECT_TRUE(is_poison(routed.ranks.in(d, routed.x_recv), 0)) << "rank " << d;
  }
}

TEST(Dispatch, RefusesWhatLiesOutsideTheWindow) {
  Random random;
  const Routed routed(two_ranks(), random);
  const TestTensor outside(DType::kFP32, {18, routed.options.hidden});
  DispatchArgs args = routed.dispatch(0);
  args.x_recv = outside;
  EXPECT_TRUE(fails(moire::dispatch(routed.ranks.context(0), args), Code::kInvalidArgument,
                    "dispatch: x_recv is fp32 [18, 40] outside the window of rank 0, must lie in "
                    "its 1048576 bytes"));
  args.x_recv = routed.ranks.in(0, routed.x_recv);
  args.x_recv.data = static_cast<std::byte*>(args.x_recv.data) + (1 << 20) - 18 * 40 * 4;
  EXPECT_TRUE(fails(moire::dispatch(routed.ranks.context(0), args), Code::kInvalidArgument,
                    "outside the window of rank 0"));
}

TEST(Dispatch, NamesOtherNumbersOfRanks) {
  Random random;
  const Routed routed(two_ranks(), random);
  EXPECT_TRUE(fails(moire::dispatch(cpu(1), routed.dispatch(0)), Code::kInvalidArgument,
                    "dispatch: places is int32 [9, 2] but the context's communicator has 1 rank, "
                    "needs a column for each"));
  DispatchArgs args = routed.dispatch(0);
  args.x_recv.shape[0] = 17;
  EXPECT_TRUE(fails(moire::dispatch(routed.ranks.context(0), args), Code::kInvalidArgument,
                    "its rows must be a multiple of the 2 ranks"));
}

// Nobody is asked: an explaining context may be of as many ranks as the call has.
TEST(Dispatch, IsExplainedWithoutOtherRanks) {
  Random random;
  const Routed routed(two_ranks(), random);
  const Context explaining = cpu(2).explaining();
  ASSERT_TRUE(succeeds(moire::dispatch(explaining, routed.dispatch(0))));
  const Step step = explaining.explanation().at(0);
  EXPECT_EQ(step.problem, "9 tokens, 2 ranks, capacity 9, fp32 [18, 40] in the window");
  EXPECT_EQ(step.bytes_written, 18 * 40 * 4 + 18 * 2 * 8);
}

}  // namespace
}  // namespace moire::test
