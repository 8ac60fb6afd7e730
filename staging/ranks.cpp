#include "staging/ranks.h"

#include <algorithm>
#include <map>
#include <string>

#include "staging/device_memory.h"
#include "staging/team.h"

namespace moire::staging {

size_t Ranks::take(DType dtype, int64_t rows, int64_t columns) {
  tensors_.emplace_back(TensorView(nullptr, dtype, {rows, columns}));
  offsets_.push_back(window_bytes_);
  window_bytes_ += (tensors_.back().num_bytes() + kGuard - 1) / kGuard * kGuard + kGuard;
  return tensors_.size() - 1;
}

Status Ranks::open() {
  auto made = Communicator::threads(size_, static_cast<size_t>(window_bytes_));
  if (!made.ok()) return made.status();
  communicators_ = std::move(made).value();
  for (const auto& w : windows()) std::fill(w.begin(), w.end(), std::byte{0xFF});
  return {};
}

std::span<std::byte> Ranks::window(size_t rank) const {
  const Workspace window = communicators_[rank]->window();
  return {static_cast<std::byte*>(window.data), window.bytes};
}

std::vector<std::span<std::byte>> Ranks::windows() const {
  std::vector<std::span<std::byte>> out;
  for (size_t rank = 0; rank < communicators_.size(); ++rank) out.push_back(window(rank));
  return out;
}

TensorView Ranks::in(size_t rank, size_t tensor) const {
  TensorView t = tensors_[tensor];
  if (is_open()) t.data = window(rank).data() + offsets_[tensor];
  return t;
}

Status Ranks::open_on_devices() {
  if (size_ > kMostRanksOnDevices) {
    return {Code::kUnsupported, std::to_string(size_) + " ranks on CUDA devices, needed at most " +
                                    std::to_string(kMostRanksOnDevices)};
  }
  std::vector<int32_t> indices;
  for (int rank = 0; rank < size_; ++rank) indices.push_back(device_of_rank(rank));
  CommunicatorOptions options;
  options.num_ranks = size_;
  options.window_bytes = static_cast<size_t>(window_bytes_);
  options.device = MOIRE_CUDA;
  options.indices = indices.data();
  auto made = Communicator::threads(options);
  if (!made.ok()) return made.status();
  on_device_ = std::move(made).value();
  for (size_t rank = 0; rank < on_device_.size(); ++rank) {
    staged_.emplace_back().leave_out(window(rank).data(), window(rank).size(),
                                     static_cast<std::byte*>(on_device_[rank]->window().data));
  }
  return {};
}

Status Ranks::make_contexts(const Context& like) {
  if (!contexts_.empty()) return {};
  ContextOptions options = like.options();
  const bool on_device = options.device == Device::kCuda;
  if (on_device && on_device_.empty()) {
    if (Status status = open_on_devices(); !status.ok()) return status;
  }
  options.num_threads = std::max(1, options.num_threads / size_);
  std::vector<Context> made_contexts;
  for (int rank = 0; rank < size_; ++rank) {
    options.communicator = (on_device ? on_device_ : communicators_)[static_cast<size_t>(rank)];
    if (on_device) options.index = device_of_rank(rank), options.stream = stream_of_rank(rank);
    Result<Context> made = Context::create(options);
    if (!made.ok()) return made.status();
    made_contexts.push_back(std::move(made).value());
  }
  contexts_ = std::move(made_contexts);
  return {};
}

Status Ranks::run_staged(const Call& call) {
  if (on_device_.empty()) return run_all(call);
  const auto in_device = [&](size_t rank) {
    return static_cast<std::byte*>(on_device_[rank]->window().data);
  };
  for (size_t rank = 0; rank < on_device_.size(); ++rank) {
    const std::span<std::byte> w = window(rank);
    if (Status status = copy_to_device(in_device(rank), w.data(), w.size()); !status.ok()) {
      return status;
    }
  }
  Status found = run_all([&](size_t rank, const Context& context) {
    const auto [status, finding] = call_in_turn(context, [&] { return call(rank, context); });
    return status.ok() ? finding : status;
  });
  for (size_t rank = 0; rank < on_device_.size(); ++rank) {
    const std::span<std::byte> w = window(rank);
    Status status = staged_[rank].download();
    if (status.ok()) status = copy_to_host(w.data(), in_device(rank), w.size());
    if (!status.ok()) return status;
  }
  return found;
}

Status Ranks::run_all(const Call& call) {
  static std::map<int, Team> teams;
  Team& team = teams.try_emplace(size_, size_).first->second;
  std::vector<Status> found(communicators_.size());
  team.run([&](int thread) {
    const auto rank = static_cast<size_t>(thread);
    found[rank] = call(rank, contexts_[rank]);
  });
  for (const Status& status : found) {
    if (status.message() == found[0].message()) continue;
    return {Code::kInternal,
            "ranks differ: \"" + found[0].message() + "\" and \"" + status.message() + "\""};
  }
  return found[0];
}

}  // namespace moire::staging
