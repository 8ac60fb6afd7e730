// Ranks on GPUs: what is captured, what kernels find wrong, and calls on two streams. The suites
// of tests/parallel judge what the ops compute; here the CPU's ranks have the same tokens.
#include "tests/parallel/ranks.h"

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <chrono>
#include <limits>
#include <optional>
#include <thread>

#include "backend/cuda/parallel/meeting.h"
#include "tests/gpu/gpu.h"
#include "tests/ops/routing_support.h"
#include "tests/support/expect.h"

namespace moire::test {
namespace {

RoutingOptions routing_of(int64_t ranks, Device device) {
  RoutingOptions o;
  for (int64_t r = 0; r < ranks; ++r) o.tokens.push_back(r == 2 ? 0 : 40 + r);
  o.k = 6;
  o.hidden = 264;
  o.dtype = DType::kBF16;
  o.drops = true;
  o.device = device;
  return o;
}

// A rank's step: plan, dispatch, and combine of what it received, as if experts changed nothing.
struct Step {
  Step(const Routed& routed, int rank)
      : places(routed.of(rank).places),
        counts(routed.of(rank).counts),
        y(routed.options.dtype, {places.view().shape[0], routed.options.hidden}),
        topk_weights(DType::kFP32, {places.view().shape[0], routed.options.k}) {
    places.poison();
    counts.poison();
    plan.topk_idx = routed.of(rank).topk_idx;
    plan.num_experts = routed.options.num_experts();
    plan.capacity = routed.options.room();
    plan.places = places;
    plan.counts = counts;
    there = routed.dispatch(rank);
    back = routed.combine(rank, y, topk_weights);
    there.places = back.places = places;
    there.counts = counts;
  }
  Status run(const Context& context) const {
    if (Status status = moire::dispatch_plan(context, plan); !status.ok()) return status;
    if (Status status = moire::dispatch(context, there); !status.ok()) return status;
    return moire::combine(context, back);
  }

  TestTensor places, counts, y, topk_weights;
  DispatchPlanArgs plan;
  DispatchArgs there;
  CombineArgs back;
};

// A rank on the GPU, with a stream of its own, whose step lies there at addresses that stay.
class RankOnGpu {
 public:
  RankOnGpu(Routed& routed, int rank)
      : staged_(routed.ranks.staged(rank)),
        step(routed, rank),
        stream(static_cast<cudaStream_t>(staging::stream_of_rank(rank))) {
    context.emplace(on(routed, rank, stream));
    upload();
    on_device_.emplace(step);
    on_device_->plan = staged_.on_device(step.plan);
    on_device_->there = staged_.on_device(step.there);
    on_device_->back = staged_.on_device(step.back);
  }
  RankOnGpu(const RankOnGpu&) = delete;
  RankOnGpu& operator=(const RankOnGpu&) = delete;
  ~RankOnGpu() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  }

  // A context of that rank on a stream.
  static Context on(Routed& routed, int rank, cudaStream_t stream) {
    ContextOptions options;
    options.device = Device::kCuda;
    options.communicator = routed.ranks.communicator(rank);
    options.index = options.communicator->index();
    options.stream = stream;
    return Context::create(options).value();
  }
  void upload() {
    staged_.clear();
    staged_.add(step.plan);
    staged_.add(step.there);
    staged_.add(step.back);
    EXPECT_TRUE(succeeds(staged_.upload()));
  }
  Status run() const { return on_device_->run(*context); }
  Status dispatch(const Context& with) const { return moire::dispatch(with, on_device_->there); }
  // As where a launch after the first of its three fails, once all ranks have met in that.
  Status dispatch_in_part(int64_t room) const {
    cuda::Launcher launcher(*context, "dispatch");
    cuda::DeviceExchange call(*context, launcher, on_device_->there, room);
    const Status status = call.begin();
    cudaStreamSynchronize(stream);
    return status;
  }
  void capture() {
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaSetDevice(context->options().index), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    const Status status = run();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_TRUE(succeeds(status));
    ASSERT_EQ(cudaGraphInstantiate(&executable_, graph, 0), cudaSuccess);
    ASSERT_EQ(cudaGraphUpload(executable_, stream), cudaSuccess);  // not while another waits
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    cudaGraphDestroy(graph);
  }
  void replay() const {
    ASSERT_EQ(cudaSetDevice(context->options().index), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(executable_, stream), cudaSuccess);
  }
  // What check() says once the stream is done; results are on the host then.
  Status finish() {
    const Status status = context->check();
    EXPECT_TRUE(succeeds(staged_.download()));
    return status;
  }

 private:
  staging::StagedCall& staged_;

 public:
  Step step;
  cudaStream_t stream;
  std::optional<Context> context;

 private:
  std::optional<Step> on_device_;
  cudaGraphExec_t executable_ = nullptr;
};

// Ranks on the GPU, and what the CPU's make of the same tokens.
struct Both {
  explicit Both(int64_t ranks,
                const std::vector<std::shared_ptr<Communicator>>& communicators = {}) {
    Random random;
    RoutingOptions on_cuda = routing_of(ranks, Device::kCuda);
    on_cuda.communicators = communicators;
    gpu.emplace(on_cuda, random);
    cpu.emplace(routing_of(ranks, Device::kCpu), random);
    for (int rank = 0; rank < size(); ++rank) {
      cpu->tokens[static_cast<size_t>(rank)] = std::make_unique<Tokens>(gpu->of(rank));
    }
    for (int rank = 0; rank < size(); ++rank) {
      want.push_back(std::make_unique<Step>(*cpu, rank));
      on_gpu.push_back(std::make_unique<RankOnGpu>(*gpu, rank));
    }
    cpu->ranks.succeed([&](int rank, const Tested& tested) {
      return want[static_cast<size_t>(rank)]->run(tested.context());
    });
    gpu->ranks.upload();
  }
  int size() const { return cpu->ranks.size(); }
  // Every rank has what the CPU's has, and so does its window.
  void expect_same() {
    for (size_t rank = 0; rank < on_gpu.size(); ++rank) {
      SCOPED_TRACE(testing::Message() << "rank " << rank);
      EXPECT_TRUE(succeeds(on_gpu[rank]->finish()));
      const Step &got = on_gpu[rank]->step, &wanted = *want[rank];
      EXPECT_TRUE(same_bits(got.places, wanted.places));
      EXPECT_TRUE(same_bits(got.counts, wanted.counts));
      EXPECT_TRUE(same_bits(got.y, wanted.y));
      EXPECT_TRUE(same_bits(got.topk_weights, wanted.topk_weights));
    }
    gpu->ranks.download();
    for (int rank = 0; rank < size(); ++rank) {
      for (const size_t t : {cpu->x_recv, cpu->topk_idx_recv, cpu->topk_weights_recv}) {
        EXPECT_TRUE(same_bits(gpu->ranks.in(rank, t), cpu->ranks.in(rank, t)));
      }
    }
    EXPECT_TRUE(gpu->ranks.are_undamaged());
  }

  std::optional<Routed> gpu, cpu;
  std::vector<std::unique_ptr<Step>> want;
  std::vector<std::unique_ptr<RankOnGpu>> on_gpu;
};

class RanksOnGpu : public Gpu {};

TEST_F(RanksOnGpu, AStepIsOneGraphThatMayBeReplayed) {
  for (const int64_t ranks : {1, 2, 4}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    Both both(ranks);
    for (const auto& rank : both.on_gpu) ASSERT_NO_FATAL_FAILURE(rank->capture());
    for (int i = 0; i < 100; ++i) {
      for (const auto& rank : both.on_gpu) rank->replay();
    }
    both.expect_same();
  }
}

// Its blocks tell each other their counts by a word that is clear again after every call.
TEST_F(RanksOnGpu, APlanOfManyBlocksMayBeReplayed) {
  Random random;
  RoutingOptions routing = routing_of(2, Device::kCpu);
  routing.tokens = {5000, 1};
  Tokens tokens(routing, 0, random), want(tokens);
  DispatchPlanArgs plan;
  plan.topk_idx = tokens.topk_idx;
  plan.num_experts = routing.num_experts();
  plan.capacity = 4000;
  plan.places = tokens.places;
  plan.counts = tokens.counts;
  ASSERT_TRUE(succeeds(want.plan(Tested(cpu(1)), plan.capacity)));
  ContextOptions options = context().options();
  options.stream = staging::stream_of_rank(0);
  const auto stream = static_cast<cudaStream_t>(options.stream);
  const Context on_stream = context().sharing(options).value();
  size_t bytes = 0;
  ASSERT_TRUE(succeeds(dispatch_plan_workspace(on_stream, plan, &bytes)));
  const TestWorkspace workspace(bytes);
  plan.workspace = workspace.get();
  staging::StagedCall staged;
  staged.add(plan);
  ASSERT_TRUE(succeeds(staged.upload()));
  const DispatchPlanArgs on_device = staged.on_device(plan);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  const Status status = dispatch_plan(on_stream, on_device);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_TRUE(succeeds(status));
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int i = 0; i < 100; ++i) ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  ASSERT_TRUE(succeeds(dispatch_plan(on_stream, on_device)));
  EXPECT_TRUE(succeeds(on_stream.check()));
  EXPECT_TRUE(succeeds(staged.download()));
  EXPECT_TRUE(same_bits(tokens.places, want.places));
  EXPECT_TRUE(same_bits(tokens.counts, want.counts));
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST_F(RanksOnGpu, OneReplaysItsGraphWhileAnotherCallsEagerly) {
  Both both(3);
  ASSERT_NO_FATAL_FAILURE(both.on_gpu[0]->capture());
  for (int i = 0; i < 20; ++i) {
    both.on_gpu[0]->replay();
    ASSERT_TRUE(succeeds(both.on_gpu[1]->run()));
    ASSERT_TRUE(succeeds(both.on_gpu[2]->run()));
  }
  both.expect_same();
}

TEST_F(RanksOnGpu, ACallOnAnotherStreamIsRefused) {
  Both both(2);
  RankOnGpu &first = *both.on_gpu[0], &second = *both.on_gpu[1];
  const Context beside =
      RankOnGpu::on(*both.gpu, 0, static_cast<cudaStream_t>(staging::stream_of_rank(2)));
  ASSERT_TRUE(succeeds(first.run()));                           // waits for rank 1
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // it has begun
  ASSERT_TRUE(succeeds(first.dispatch(beside)));
  EXPECT_TRUE(fails(beside.check(), Code::kInvalidArgument,
                    "dispatch: rank 0 is in a call already, on another thread or stream"));
  ASSERT_TRUE(succeeds(second.run()));
  both.expect_same();
}

// It has not come to the end of its call, whose others are told so, and neither is it in one.
TEST_F(RanksOnGpu, ARankWhoseWorkFailsHasLeft) {
  Both both(3);
  const std::string found = "dispatch: rank 1 has left; calls of these ranks fail from now on";
  RankOnGpu& failing = *both.on_gpu[1];
  for (const int rank : {0, 2}) ASSERT_TRUE(succeeds(both.on_gpu[rank]->run()));
  ASSERT_TRUE(succeeds(failing.dispatch_in_part(both.gpu->options.room())));
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(fails(both.on_gpu[rank]->finish(), Code::kRankFailed, found));
  }
  for (int i = 0; i < 2; ++i) {
    for (const auto& rank : both.on_gpu) {
      ASSERT_TRUE(succeeds(rank->dispatch(*rank->context)));
      EXPECT_TRUE(fails(rank->context->check(), Code::kRankFailed, found));
    }
  }
}

// Fewer blocks than ranks: each clears the choices of several.
TEST_F(RanksOnGpu, MovesRowsOnAsManyMultiprocessorsAsItMay) {
  for (const int multiprocessors : {1, 2, 5}) {
    Both both(7, Ranks::threads(7, 20'000, Device::kCuda, multiprocessors));
    for (const auto& rank : both.on_gpu) ASSERT_TRUE(succeeds(rank->run()));
    both.expect_same();
  }
}

// One context on two threads: no launch of either comes between the three of the other's call, nor
// does a product there take for its tiles what says that the call goes on.
TEST_F(RanksOnGpu, TwoThreadsMayUseOneStream) {
  constexpr int64_t kGroups = 40, kRows = 256, kWidth = 512;  // more tiles than blocks
  constexpr int kTimes = 200;
  Both both(1);
  const RankOnGpu& rank = *both.on_gpu[0];
  TestTensor a(DType::kBF16, {kGroups * kRows, kWidth}), w(DType::kBF16, {kGroups, kWidth, kWidth});
  TestTensor d = a.fill(1);
  w.fill(1);
  std::vector<int64_t> offsets;
  for (int64_t g = 0; g <= kGroups; ++g) offsets.push_back(g * kRows);
  GroupedGemmArgs args;
  args.a = a, args.b = Weight(w), args.d = d;
  args.groups = Groups(offsets.data(), kGroups, kGroups * kRows);
  staging::StagedCall staged;
  staged.add(args);
  ASSERT_TRUE(succeeds(staged.upload()));
  const GroupedGemmArgs on_device = staged.on_device(args);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < kTimes; ++n) EXPECT_TRUE(succeeds(rank.run()));
    });
  }
  for (int n = 0; n < kTimes; ++n) EXPECT_TRUE(succeeds(grouped_gemm(*rank.context, on_device)));
  for (std::thread& thread : threads) thread.join();
  both.expect_same();
}

// Values that there are not: reported, and nothing is written where it does not belong.
TEST_F(RanksOnGpu, FindWrongIndicesAndWriteNothingElsewhere) {
  Random random;
  for (const int64_t wrong : {int64_t{-2}, int64_t{1} << 20, std::numeric_limits<int64_t>::min()}) {
    Routed routed(routing_of(2, Device::kCuda), random);
    set_index(routed.tokens[0]->topk_idx, 3, 1, wrong);
    RankOnGpu rank(routed, 0), other(routed, 1);
    routed.ranks.upload();
    ASSERT_NO_FATAL_FAILURE(rank.capture());  // so that no call of the host meets what it finds
    rank.replay();
    ASSERT_TRUE(succeeds(other.run()));
    EXPECT_TRUE(fails(rank.finish(), Code::kInvalidArgument,
                      "topk_idx[19] is " + std::to_string(wrong) + ", must be below 9"));
    EXPECT_TRUE(succeeds(other.finish()));
    routed.ranks.download();
    EXPECT_TRUE(routed.ranks.are_undamaged());
  }
}

TEST_F(RanksOnGpu, FindWrongPlacesAndWriteNothingElsewhere) {
  Random random;
  for (const int32_t wrong : {-2, 41, std::numeric_limits<int32_t>::max()}) {
    Routed routed(routing_of(2, Device::kCuda), random);
    const std::vector<Status> statuses = routed.ranks.run([&](int rank, const Tested& context) {
      TestTensor places = routed.of(rank).places;
      if (rank == 0) set_index(places, 2, 1, wrong);
      DispatchArgs args = routed.dispatch(rank);
      args.places = places;
      return test::dispatch(context, args);
    });
    EXPECT_TRUE(fails(statuses[0], Code::kInvalidArgument,
                      "dispatch: places[5] is " + std::to_string(wrong) + ", must be below 41"));
    EXPECT_TRUE(succeeds(statuses[1]));
    EXPECT_TRUE(routed.ranks.are_undamaged());
  }
}

// More of them need as many GPUs.
TEST_F(RanksOnGpu, OfNcclMayBeOneAlone) {
  void* const library = dlopen("libnccl.so.2", RTLD_NOW);
  if (library == nullptr) GTEST_SKIP() << dlerror();
  const auto new_id = reinterpret_cast<int (*)(char*)>(dlsym(library, "ncclGetUniqueId"));
  char id[128];
  ASSERT_TRUE(new_id != nullptr && new_id(id) == 0);
  CommunicatorOptions options;
  options.num_ranks = 1;
  options.window_bytes = Ranks::kBytes;
  options.nccl_id = id;
  const auto alone = Communicator::nccl(options);
  if (alone.status().code() == Code::kUnsupported) GTEST_SKIP() << alone.status().message();
  ASSERT_TRUE(succeeds(alone.status()));
  EXPECT_EQ(alone.value()->size(), 1);
  Both both(1, {alone.value()});
  ASSERT_NO_FATAL_FAILURE(both.on_gpu[0]->capture());
  for (int i = 0; i < 3; ++i) both.on_gpu[0]->replay();
  both.expect_same();
}

}  // namespace
}  // namespace moire::test
