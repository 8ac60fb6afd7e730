#include "tests/parallel/ranks.h"

#include <moire/fields.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "reference/tensor.h"
#include "tests/ops/routing_support.h"

namespace moire::test {

std::vector<std::shared_ptr<Communicator>> Ranks::threads(int size, int64_t timeout_ms,
                                                          Device device, int num_multiprocessors) {
  std::vector<int32_t> indices;
  for (int rank = 0; rank < size; ++rank) indices.push_back(staging::device_of_rank(rank));
  CommunicatorOptions options;
  options.num_ranks = size;
  options.window_bytes = kBytes;
  options.timeout_ms = timeout_ms;
  options.device = static_cast<int32_t>(device);
  options.num_multiprocessors = num_multiprocessors;
  if (device == Device::kCuda) options.indices = indices.data();
  return Communicator::threads(options).value();
}

Ranks::Ranks(const std::vector<std::shared_ptr<Communicator>>& communicators, int num_threads)
    : communicators_(communicators) {
  const Context shared = cpu();
  for (const auto& communicator : communicators_) {
    const Device device = communicator->device();
    ContextOptions options;
    options.device = device;
    options.index = communicator->index();
    options.num_threads = num_threads;
    options.communicator = communicator;
    if (device == Device::kCuda) options.stream = staging::stream_of_rank(communicator->rank());
    const bool shares = device == Device::kCpu && num_threads == 0;
    contexts_.push_back(shares ? shared.sharing(options).value()
                               : Context::create(options).value());
    staged_.push_back(std::make_unique<staging::StagedCall>(staging::DeviceMemory::Kind::kHost));
    if (device == Device::kCpu) continue;
    copies_.emplace_back(kBytes);
    staged_.back()->leave_out(static_cast<std::byte*>(copies_.back().data()), kBytes,
                              static_cast<std::byte*>(communicator->window().data));
    EXPECT_TRUE(succeeds(staged_.back()->reserve(kBytes)));
  }
  poison();
}

Tested Ranks::tested(int rank) const {
  return Tested::staged_by(*staged_.at(at(rank)), contexts_.at(at(rank)));
}

std::byte* Ranks::window(int rank) const {
  void* const data =
      copies_.empty() ? communicators_.at(at(rank))->window().data : copies_.at(at(rank)).data();
  return static_cast<std::byte*>(data);
}

size_t Ranks::take(DType dtype, int64_t rows, int64_t columns, int64_t padding) {
  TensorView t(nullptr, dtype, {rows, columns}, columns + padding);
  t.data = static_cast<std::byte*>(nullptr) + used_;
  used_ = (used_ + static_cast<size_t>(span_bytes(t)) + kGuard + 255) / 256 * 256;
  EXPECT_LE(used_, kBytes) << "the window is too small for this test";
  taken_.push_back(t);
  return taken_.size() - 1;
}

TensorView Ranks::in(int rank, size_t tensor) const {
  TensorView t = taken_.at(tensor);
  t.data = window(rank) + (static_cast<std::byte*>(t.data) - static_cast<std::byte*>(nullptr));
  return t;
}

void Ranks::poison() {
  for (int rank = 0; rank < size(); ++rank) std::memset(window(rank), 0xFF, kBytes);
}

bool Ranks::are_undamaged() const {
  for (int rank = 0; rank < size(); ++rank) {
    const std::byte* const first_byte = window(rank);
    std::vector<std::byte> bytes(first_byte, first_byte + kBytes);
    for (size_t i = 0; i < taken_.size(); ++i) {
      const TensorView t = in(rank, i);
      const int64_t unit = dtype_size(t.type());
      for (int64_t row = 0; row < t.shape[0]; ++row) {
        auto* first =
            bytes.data() + (static_cast<std::byte*>(t.data) - first_byte) + row * t.stride() * unit;
        std::fill_n(first, t.shape[1] * unit, std::byte{0xFF});
      }
    }
    const auto is_poison = [](std::byte b) { return b == std::byte{0xFF}; };
    if (!std::all_of(bytes.begin(), bytes.end(), is_poison)) return false;
  }
  return true;
}

void Ranks::upload() const {
  for (size_t rank = 0; rank < copies_.size(); ++rank) {
    auto* const on_device = static_cast<std::byte*>(communicators_[rank]->window().data);
    const auto* const copy = static_cast<const std::byte*>(copies_[rank].data());
    EXPECT_TRUE(succeeds(staging::copy_to_device(on_device, copy, kBytes)));
  }
}

void Ranks::download() const {
  for (size_t rank = 0; rank < copies_.size(); ++rank) {
    const auto* const on_device =
        static_cast<const std::byte*>(communicators_[rank]->window().data);
    auto* const copy = static_cast<std::byte*>(copies_[rank].data());
    EXPECT_TRUE(succeeds(staging::copy_to_host(copy, on_device, kBytes)));
  }
}

std::vector<Status> Ranks::run(const Call& call) const {
  upload();
  std::vector<Status> statuses(communicators_.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size(); ++rank) {
    threads.emplace_back([&, rank] { statuses[at(rank)] = call(rank, tested(rank)); });
  }
  for (std::thread& thread : threads) thread.join();
  download();
  return statuses;
}

void Ranks::succeed(const Call& call) const {
  const std::vector<Status> statuses = run(call);
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_TRUE(succeeds(statuses[at(rank)])) << "rank " << rank;
  }
}

void random_bytes(TestTensor& t, Random& random) {
  std::generate_n(t.as<uint8_t>(), t.view().num_bytes(),
                  [&] { return static_cast<uint8_t>(random.integer(0, 200)); });
}

int64_t RoutingOptions::room() const {
  const int64_t most = *std::max_element(tokens.begin(), tokens.end());
  return capacity == 0 ? most : capacity;
}

Tokens::Tokens(const RoutingOptions& o, int rank, Random& random)
    : x(o.dtype, {o.tokens[static_cast<size_t>(rank)], o.hidden}, o.padding),
      topk_idx(o.index_type, {x.view().shape[0], o.k}, o.padding),
      topk_weights(DType::kFP32, {x.view().shape[0], o.k}, o.padding),
      places(DType::kInt32, {x.view().shape[0], o.ranks()}, o.padding),
      counts(DType::kInt64, {o.ranks()}),
      num_experts(o.num_experts()) {
  o.dtype == DType::kE4M3 ? random_bytes(x, random) : static_cast<void>(x.randomize(random));
  topk_weights.randomize(random);
  for (int64_t t = 0; t < x.view().shape[0]; ++t) {
    for (int64_t j = 0; j < o.k; ++j) {
      const int64_t lowest = o.drops ? -1 : 0, highest = num_experts - (o.drops ? 0 : 1);
      const int64_t at_rank_j = j * o.local_experts + random.integer(0, o.local_experts - 1);
      const int64_t any = random.integer(lowest, highest);
      const int64_t one = j < o.ranks() && random.integer(0, 3) != 0 ? at_rank_j : -1;
      set_index(topk_idx, t, j, o.one_each ? one : any);
    }
  }
}

Status Tokens::plan(const Tested& context, int64_t capacity) {
  DispatchPlanArgs args;
  args.topk_idx = topk_idx;
  args.num_experts = num_experts;
  args.capacity = capacity;
  args.places = places;
  args.counts = counts;
  return test::run(context, args);
}

Routed::Routed(const RoutingOptions& o, Random& random, int64_t timeout_ms, int num_threads)
    : options(o),
      ranks(o.communicators.empty() ? Ranks::threads(o.ranks(), timeout_ms, o.device)
                                    : o.communicators,
            num_threads) {
  for (int rank = 0; rank < o.ranks(); ++rank) {
    tokens.push_back(std::make_unique<Tokens>(o, rank, random));
    EXPECT_TRUE(succeeds(tokens.back()->plan(Tested(cpu(1)), o.room())));
  }
  const int64_t rows = o.ranks() * o.room();
  x_recv = ranks.take(o.dtype, rows, o.hidden, o.padding);
  topk_idx_recv = ranks.take(DType::kInt32, rows, o.k, o.padding);
  topk_weights_recv = ranks.take(DType::kFP32, rows, o.k, o.padding);
}

DispatchArgs Routed::dispatch(int rank) const {
  const Tokens& sent = of(rank);
  DispatchArgs args;
  args.x = sent.x;
  args.places = sent.places;
  args.counts = sent.counts;
  args.topk_idx = sent.topk_idx;
  args.topk_weights = sent.topk_weights;
  args.num_experts = sent.num_experts;
  args.x_recv = ranks.in(rank, x_recv);
  args.topk_idx_recv = ranks.in(rank, topk_idx_recv);
  args.topk_weights_recv = ranks.in(rank, topk_weights_recv);
  return args;
}

CombineArgs Routed::combine(int rank, const TestTensor& y, const TestTensor& topk_weights) const {
  CombineArgs args;
  args.rows = ranks.in(rank, x_recv);
  args.places = of(rank).places;
  args.y = y;
  args.topk_weights_recv = ranks.in(rank, topk_weights_recv);
  args.topk_idx = of(rank).topk_idx;
  args.num_experts = options.num_experts();
  args.topk_weights = topk_weights;
  return args;
}

int64_t Routed::row(int rank, int64_t t, int receiver) const {
  const int64_t place = reference::read_index(of(rank).places, t, receiver);
  return place < 0 ? -1 : rank * options.room() + place;
}

}  // namespace moire::test
