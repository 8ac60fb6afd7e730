// Communicators, and the ranks that are threads of one process.
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

struct ThreadPeers : Peers {
  std::shared_ptr<Memories> memories;
};

std::unique_ptr<Peers> thread_peers(int rank, const std::shared_ptr<Memories>& memories,
                                    size_t window_bytes, int64_t timeout_ms) {
  auto peers = std::make_unique<ThreadPeers>();
  peers->rank = rank;
  peers->window_bytes = window_bytes;
  peers->timeout = std::chrono::milliseconds(timeout_ms == 0 ? kTimeoutMs : timeout_ms);
  for (const Buffer& memory : *memories) {
    peers->memory.push_back(static_cast<std::byte*>(memory.data()));
  }
  peers->memories = memories;
  return peers;
}

}  // namespace

void leave(const Peers& peers, int64_t why) {
  for (int of = 0; of < peers.size(); ++of) {
    int64_t none = 0;
    std::atomic_ref(peers.mailbox(of, peers.rank).gone)
        .compare_exchange_strong(none, why, std::memory_order_release, std::memory_order_relaxed);
  }
}

const Peers* peers_of(const Context& context) {
  const auto& communicator = context.options().communicator;
  return communicator == nullptr ? nullptr : &communicator->peers();
}

Communicator::Communicator(std::unique_ptr<Peers> peers) : peers_(std::move(peers)) {}
Communicator::~Communicator() { leave(); }

Device Communicator::device() const { return peers_->device; }
int Communicator::rank() const { return peers_->rank; }
int Communicator::size() const { return peers_->size(); }
Workspace Communicator::window() const {
  return {peers_->window(peers_->rank), peers_->window_bytes};
}
void Communicator::leave() { moire::leave(*peers_, has_left(peers_->rank)); }

Result<std::vector<std::shared_ptr<Communicator>>> Communicator::threads(int num_ranks,
                                                                         size_t window_bytes,
                                                                         int64_t timeout_ms) {
  constexpr std::string_view kCall = "communicator";
  if (num_ranks < 1 || num_ranks > kMostRanks) {
    return invalid(kCall, concat("num_ranks is ", num_ranks, ", must be 1 to ", kMostRanks));
  }
  if (timeout_ms < 0 || timeout_ms > kMostMs) {
    return invalid(kCall,
                   concat("timeout_ms is ", timeout_ms, ", must be 0 (ten minutes) to ", kMostMs));
  }
  const auto memories = std::make_shared<Memories>();
  for (int rank = 0; rank < num_ranks; ++rank) {
    const size_t bytes = header_bytes(num_ranks) + window_bytes;
    memories->emplace_back(bytes < window_bytes ? SIZE_MAX : bytes);
    if (memories->back().ok()) continue;
    return Status(Code::kOutOfMemory, concat(kCall, ": no memory for a window of ", window_bytes,
                                             " bytes of rank ", rank, " of ", num_ranks));
  }
  std::vector<std::shared_ptr<Communicator>> communicators;
  communicators.reserve(memories->size());
  for (int rank = 0; rank < num_ranks; ++rank) {
    communicators.push_back(
        std::make_shared<Communicator>(thread_peers(rank, memories, window_bytes, timeout_ms)));
  }
  return communicators;
}

}  // namespace moire
