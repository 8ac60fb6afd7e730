// Ranks that leave, are late, or make other calls: every other rank gets an error that names them,
// nobody waits longer than the deadline.
#include <chrono>
#include <thread>

#include "tests/parallel/ranks.h"
#include "tests/support/expect.h"

namespace moire::test {
namespace {

using Clock = std::chrono::steady_clock;

RoutingOptions four_ranks() {
  RoutingOptions options;
  options.tokens = {5, 9, 2, 7};
  return options;
}

Status dispatch(const Routed& routed, int rank, const Tested& context) {
  return test::dispatch(context, routed.dispatch(rank));
}

constexpr int64_t kDeadlineMs = 300;

TEST(Faults, ARankThatNeverComesIsNamedWithinTheDeadline) {
  Random random;
  const Routed routed(four_ranks(), random, kDeadlineMs);
  const auto begin = Clock::now();
  const std::vector<Status> statuses =
      routed.ranks.run([&](int rank, const Tested& context) -> Status {
        return rank == 2 ? Status() : dispatch(routed, rank, context);
      });
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(30)) << "a deadline of 300 ms";
  for (const int rank : {0, 1, 3}) {
    EXPECT_TRUE(fails(statuses[static_cast<size_t>(rank)], Code::kRankFailed, "rank 2"));
  }
}

TEST(Faults, ARankThatComesTooLateIsToldSo) {
  Random random;
  const Routed routed(four_ranks(), random, kDeadlineMs);
  std::vector<Status> statuses(4);
  std::thread others([&] {
    statuses = routed.ranks.run([&](int rank, const Tested& context) -> Status {
      return rank == 2 ? Status() : dispatch(routed, rank, context);
    });
  });
  others.join();
  const Status late = dispatch(routed, 2, routed.ranks.tested(2));
  EXPECT_TRUE(fails(late, Code::kRankFailed, "gave up waiting for rank 2"));
  const Status again = dispatch(routed, 0, routed.ranks.tested(0));
  EXPECT_TRUE(fails(again, Code::kRankFailed, "rank 2"))
      << "a call after it failed waits for nobody";
}

TEST(Faults, ARankThatDiesBetweenCallsIsNamedAtOnce) {
  Random random;
  Routed routed(four_ranks(), random);  // a deadline of a minute
  const auto begin = Clock::now();
  const std::vector<Status> statuses =
      routed.ranks.run([&](int rank, const Tested& context) -> Status {
        if (Status status = dispatch(routed, rank, context); !status.ok()) return status;
        if (rank == 1) {
          routed.ranks.communicator(1)->leave();
          return {};
        }
        return dispatch(routed, rank, context);
      });
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(30)) << "nobody waits for who has left";
  EXPECT_TRUE(succeeds(statuses[1]));
  for (const size_t rank : {0, 2, 3}) {
    EXPECT_TRUE(fails(statuses[rank], Code::kRankFailed,
                      "dispatch: rank 1 has left; calls of these ranks fail from now on"));
  }
}

// Its last call is whole for all, whoever is first to leave after it.
TEST(Faults, RanksMayLeaveAsSoonAsTheirLastCallReturned) {
  Random random;
  for (int i = 0; i < 50; ++i) {
    Routed routed(four_ranks(), random);
    routed.ranks.succeed([&](int rank, const Tested& context) {
      Status status = dispatch(routed, rank, context);
      routed.ranks.communicator(rank)->leave();
      return status;
    });
  }
}

// Destroyed on another thread. Rank 0 sees that it has come, and must not wait for rank 2, which
// returns at once and never comes.
TEST(Faults, ARankThatLeavesDuringItsCallEndsThatOfAll) {
  Random random;
  RoutingOptions options;
  options.tokens = {5, 9, 2};
  Routed routed(options, random);  // a deadline of a minute
  const auto begin = Clock::now();
  const std::vector<Status> statuses = routed.ranks.run([&](int rank, const Tested& context) {
    if (rank == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      routed.ranks.communicator(1)->leave();
    }
    return dispatch(routed, rank, context);
  });
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(30)) << "nobody waits for who has left";
  for (const Status& status : statuses) {
    EXPECT_TRUE(fails(status, Code::kRankFailed, "dispatch: rank 1 has left"));
  }
}

TEST(Faults, ARankThatMakesAnotherCallIsNamedAndNothingMoves) {
  Random random;
  const Routed routed(four_ranks(), random);
  const TestTensor y(DType::kFP32, {7, 40}), weights(DType::kFP32, {7, 2});
  const std::vector<Status> statuses = routed.ranks.run([&](int rank, const Tested& context) {
    return rank == 3 ? test::combine(context, routed.combine(3, y, weights))
                     : dispatch(routed, rank, context);
  });
  for (const size_t rank : {0, 1, 2}) {
    EXPECT_TRUE(fails(statuses[rank], Code::kInvalidArgument,
                      "dispatch: rank 3 calls combine, rank " + std::to_string(rank) +
                          " dispatch; all ranks must make the same calls in the same order, and "
                          "nothing was moved"));
  }
  EXPECT_TRUE(
      fails(statuses[3], Code::kInvalidArgument, "combine: rank 0 calls dispatch, rank 3 combine"));
  for (int d = 0; d < 4; ++d) {
    EXPECT_TRUE(tail_is_untouched(routed.ranks.in(d, routed.x_recv), {}));
  }
  EXPECT_TRUE(tail_is_untouched(y, {}));
  // They are in step, and may go on.
  routed.ranks.succeed(
      [&](int rank, const Tested& context) { return dispatch(routed, rank, context); });
}

TEST(Faults, RanksWhoseTensorsDifferAreToldWhich) {
  Random random;
  Routed routed(four_ranks(), random);
  const size_t elsewhere = routed.ranks.take(DType::kFP32, 36, 40);
  const auto failing = [&](const auto& change) {
    const std::vector<Status> statuses = routed.ranks.run([&](int rank, const Tested& context) {
      DispatchArgs args = routed.dispatch(rank);
      if (rank == 1) change(args);
      return test::dispatch(context, args);
    });
    for (const Status& status : statuses) EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return statuses[2].message();
  };
  EXPECT_EQ(failing([&](DispatchArgs& args) {
              args.x_recv = routed.ranks.in(1, elsewhere);
            }).find("dispatch: x_recv is fp32 [36, 40] at byte "),
            0);
  EXPECT_NE(failing([](DispatchArgs& args) {
              args.x_recv.shape[0] = args.topk_idx_recv.shape[0] = args.topk_weights_recv.shape[0] =
                  40;
            }).find("of the window of rank 1 but fp32 [36, 40] at byte"),
            std::string::npos);
  EXPECT_EQ(failing([](DispatchArgs& args) { args.num_experts = 20; })
                .find("dispatch: num_experts is 20 on rank 1 but 16 on rank 2; all ranks must make "
                      "the same calls in the same order, and nothing was moved"),
            0);
  EXPECT_EQ(failing([](DispatchArgs& args) {
              args.overflow = MOIRE_OVERFLOW_DROP;
            }).find("dispatch: overflow is 1 on rank 1 but 0 on rank 2"),
            0);
}

// It has not taken part, so that the others wait for it, and it comes.
TEST(Faults, ACallThatIsRefusedMayBeMadeAgain) {
  Random random;
  const Routed routed(four_ranks(), random);
  routed.ranks.succeed([&](int rank, const Tested& context) {
    DispatchArgs args = routed.dispatch(rank);
    args.num_experts = 15;
    if (rank == 1) {
      EXPECT_TRUE(
          fails(test::dispatch(context, args), Code::kInvalidArgument, "num_experts is 15"));
    }
    return dispatch(routed, rank, context);
  });
}

// Its caller lends it threads that never come: what it was to move has not arrived.
TEST(Faults, ARankWhoseWorkFailsHasLeft) {
  Random random;
  RoutingOptions routing = four_ranks();
  routing.device = Device::kCpu;
  Routed routed(routing, random);
  ContextOptions options;
  options.communicator = routed.ranks.communicator(1);
  options.num_threads = 2;
  options.parallel = [](void (*)(void*), void*, unsigned, unsigned) {};
  const Context without_threads = Context::create(options).value();
  const std::vector<Status> statuses = routed.ranks.run([&](int rank, const Tested& context) {
    return rank == 1 ? moire::dispatch(without_threads, routed.dispatch(1))
                     : dispatch(routed, rank, context);
  });
  EXPECT_TRUE(fails(statuses[1], Code::kInvalidArgument, "returned without a call of its body"));
  for (const size_t rank : {0, 2, 3}) {
    EXPECT_TRUE(fails(statuses[rank], Code::kRankFailed, "dispatch: rank 1 has left"));
  }
}

TEST(Faults, OneCommunicatorTakesOneCallAtATime) {
  Random random;
  RoutingOptions routing = four_ranks();
  routing.device = Device::kCpu;
  const Routed routed(routing, random, kDeadlineMs);
  std::vector<Status> both(2);
  std::thread second(
      [&] { both[1] = moire::dispatch(routed.ranks.context(0), routed.dispatch(0)); });
  both[0] = moire::dispatch(routed.ranks.context(0), routed.dispatch(0));
  second.join();
  // One waits for rank 1 in vain. The other is refused, or comes after that.
  for (const Status& status : both) EXPECT_FALSE(status.ok());
  const bool was_refused =
      both[0].code() == Code::kInvalidArgument || both[1].code() == Code::kInvalidArgument;
  if (was_refused) {
    const Status& refused = both[both[0].code() == Code::kInvalidArgument ? 0 : 1];
    EXPECT_TRUE(fails(refused, Code::kInvalidArgument,
                      "dispatch: rank 0 is in a call already, on another thread or stream"));
  }
}

}  // namespace
}  // namespace moire::test
