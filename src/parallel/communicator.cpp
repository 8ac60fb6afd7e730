// Communicators, and the ranks that are threads of one process on its CPU.
#include <moire/buffer.h>
#include <moire/expert_parallel.h>

#include <atomic>

#include "core/status_macros.h"
#include "parallel/peers.h"

namespace moire {
namespace {

constexpr int64_t kTimeoutMs = 600'000;
constexpr int64_t kMostMs = int64_t{1} << 40;  // whose sum with any time fits

// The memory of all ranks, which stays until the last of them has gone.
using Memories = std::vector<Buffer>;

// Ranks on the CPU.
Result<std::vector<std::unique_ptr<Peers>>> thread_peers(const CommunicatorOptions& options) {
  const auto memories = std::make_shared<Memories>();
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    memories->emplace_back(memory_bytes(options));
    if (!memories->back().ok()) return no_memory(options, rank);
  }
  std::vector<std::unique_ptr<Peers>> out;
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    auto peers = std::make_unique<Peers>();
    peers->set(options, rank);
    for (const Buffer& memory : *memories) {
      peers->memory.push_back(static_cast<std::byte*>(memory.data()));
    }
    peers->owner = memories;
    out.push_back(std::move(peers));
  }
  return out;
}

// Ranks are checked where they are the caller's to say.
Status check(const CommunicatorOptions& options, bool says_ranks) {
  const int32_t num_ranks = options.num_ranks;
  if (says_ranks && (num_ranks < 1 || num_ranks > kMostRanks)) {
    return invalid(kCommunicator, "num_ranks is ", num_ranks, ", must be 1 to ", kMostRanks);
  }
  if (says_ranks && (options.rank < 0 || options.rank >= num_ranks)) {
    return invalid(kCommunicator, "rank is ", options.rank, ", must be 0 to ", num_ranks - 1);
  }
  if (options.timeout_ms < 0 || options.timeout_ms > kMostMs) {
    return invalid(kCommunicator, "timeout_ms is ", options.timeout_ms,
                   ", must be 0 (ten minutes) to ", kMostMs);
  }
  if (options.num_multiprocessors < 0) {
    return invalid(kCommunicator, "num_multiprocessors is ", options.num_multiprocessors,
                   ", must be 0 (all) or more");
  }
  return {};
}

}  // namespace

void Peers::set(const CommunicatorOptions& options, int of) {
  rank = of;
  window_bytes = options.window_bytes;
  timeout = std::chrono::milliseconds(options.timeout_ms == 0 ? kTimeoutMs : options.timeout_ms);
}

void Peers::leave(int64_t why) const {
  for (int of = 0; of < size(); ++of) {
    int64_t none = 0;
    std::atomic_ref(mailbox(of, rank).gone)
        .compare_exchange_strong(none, why, std::memory_order_release, std::memory_order_relaxed);
  }
}

size_t memory_bytes(const CommunicatorOptions& options) {
  const size_t bytes = header_bytes(options.num_ranks) + options.window_bytes;
  return bytes < options.window_bytes ? SIZE_MAX : bytes;
}

Status no_memory(const CommunicatorOptions& options, int rank) {
  return {Code::kOutOfMemory,
          concat(kCommunicator, ": no memory for a window of ", options.window_bytes,
                 " bytes of rank ", rank, " of ", options.num_ranks)};
}

const Peers* peers_of(const Context& context) {
  const auto& communicator = context.options().communicator;
  return communicator == nullptr ? nullptr : &communicator->peers();
}

Communicator::Communicator(std::unique_ptr<Peers> peers) : peers_(std::move(peers)) {}
Communicator::~Communicator() { leave(); }

Device Communicator::device() const { return peers_->device; }
int Communicator::index() const { return peers_->index; }
int Communicator::rank() const { return peers_->rank; }
int Communicator::size() const { return peers_->size(); }
Workspace Communicator::window() const {
  return {peers_->window(peers_->rank), peers_->window_bytes};
}
void Communicator::leave() { peers_->leave(has_left(peers_->rank)); }

Result<std::vector<std::shared_ptr<Communicator>>> Communicator::threads(int num_ranks,
                                                                         size_t window_bytes,
                                                                         int64_t timeout_ms) {
  CommunicatorOptions options;
  options.num_ranks = num_ranks;
  options.window_bytes = window_bytes;
  options.timeout_ms = timeout_ms;
  return threads(options);
}

Result<std::vector<std::shared_ptr<Communicator>>> Communicator::threads(
    const CommunicatorOptions& given) {
  CommunicatorOptions options = given;
  options.rank = 0;
  MOIRE_RETURN_IF_ERROR(check(options, true));
  if (options.device != MOIRE_CPU && options.device != MOIRE_CUDA) {
    return invalid(kCommunicator, "device is ", options.device, ", must be 0 (cpu) or 1 (cuda)");
  }
  auto made = options.device == MOIRE_CUDA ? cuda::thread_peers(options) : thread_peers(options);
  if (!made.ok()) return made.status();
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (auto& peers : made.value()) {
    communicators.push_back(std::make_shared<Communicator>(std::move(peers)));
  }
  return communicators;
}

Result<std::shared_ptr<Communicator>> Communicator::nccl(const CommunicatorOptions& options) {
  if (options.nccl_comm == nullptr && options.nccl_id == nullptr) {
    return invalid(kCommunicator, "nccl_comm and nccl_id are null, needs one of them");
  }
  MOIRE_RETURN_IF_ERROR(check(options, options.nccl_comm == nullptr));
  auto made = cuda::nccl_peers(options);
  if (!made.ok()) return made.status();
  return std::make_shared<Communicator>(std::move(made).value());
}

}  // namespace moire
