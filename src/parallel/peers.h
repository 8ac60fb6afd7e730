// Peers: what a rank knows of the others, and how the memory of each is laid out: what ranks tell
// each other at a meeting (exchange.h), then the caller's window. The same on every rank, so that
// what lies at an offset of one lies there in all. An engine derives from it what keeps the memory.
#pragma once

#include <moire/context.h>
#include <moire/expert_parallel.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/divide.h"

namespace moire {

inline constexpr int kMostRanks = 1024;

// A call as every rank makes it, up to where it is in its own window.
struct Proposal {
  static constexpr int kMostTensors = 4;
  int64_t op, num_experts, overflow;
  struct {
    moire_tensor tensor;  // without data, its stride said
    int64_t offset;       // in the window
  } tensors[kMostTensors];
};

// A word of a proposal that differs is a difference that a sentence can name.
static_assert(std::has_unique_object_representations_v<Proposal>);

// Tokens of the rank that proposes, more than their destination has room for.
struct Excess {
  int64_t tokens = 0;  // 0: none
  int64_t destination = 0, room = 0;
};

// What ended a call, as one rank found it, on the host or in a kernel.
enum class Ending : int32_t {
  kBusy,     // a call of this rank is under way
  kLeft,     // `other` has left
  kGaveUp,   // `other` gave up waiting for rank `detail`
  kLate,     // `other` has not come within `detail` ms
  kDiffers,  // `other` calls something else
  kExcess,   // `other` has more tokens than there is room for
};
struct EndedCall {
  Ending ending;
  int32_t rank;  // this one
  int64_t other, detail;
  Proposal proposal, theirs;  // theirs of kDiffers
  Excess excess;              // of kExcess
};
// As a sentence, with its code.
Status status_of(const EndedCall& call);

// What one rank tells another. Posts take turns by the parity of their epoch: a rank comes to
// meeting n + 2 only after all have come to n + 1, and so have read what was said at n.
struct Mailbox {
  struct alignas(64) Post {
    int64_t epoch;  // written last; the number of the meeting
    Proposal proposal;
    Excess excess;
  } posts[2];
  // What kernels say first: a meeting's number and a digest of the proposal, which posts spell out.
  uint64_t calls[2];
  int64_t gone;  // 0, or why the sender takes part no more: has_left(...) or did_not_come(...)
};

struct alignas(64) Header {
  int64_t turn;  // twice the number of this rank's last meeting; one more while a call is under way
  // Mailboxes follow, one for each sender.
  Mailbox* mailboxes() { return reinterpret_cast<Mailbox*>(this + 1); }
};
static_assert(sizeof(Header) % alignof(Mailbox) == 0);

// Bytes before the window.
constexpr size_t header_bytes(int num_ranks) {
  const size_t bytes = sizeof(Header) + static_cast<size_t>(num_ranks) * sizeof(Mailbox);
  return static_cast<size_t>(round_up(static_cast<int64_t>(bytes), 4096));
}

inline constexpr std::string_view kCommunicator = "communicator";
// Of a rank: its header and its window. SIZE_MAX where that is no number.
size_t memory_bytes(const CommunicatorOptions& options);
Status no_memory(const CommunicatorOptions& options, int rank);

struct Peers {
  virtual ~Peers() = default;
  // Tells every rank, this one too, that this one is gone; the first reason stays.
  virtual void leave(int64_t why) const;

  int size() const { return static_cast<int>(memory.size()); }
  Header& header(int of) const {
    return *reinterpret_cast<Header*>(memory[static_cast<size_t>(of)]);
  }
  // Where `of` finds what `from` tells it.
  Mailbox& mailbox(int of, int from) const { return header(of).mailboxes()[from]; }
  std::byte* window(int of) const { return memory[static_cast<size_t>(of)] + header_bytes(size()); }

  // What options say of every rank, for one.
  void set(const CommunicatorOptions& options, int of);

  Device device = Device::kCpu;
  int index = 0;  // of the device
  int rank = 0;
  size_t window_bytes = 0;
  std::chrono::milliseconds timeout{};
  std::vector<std::byte*> memory;  // of each rank, as this one reaches it
  std::shared_ptr<void> owner;     // of that of all, where ranks share it
};

// The peers of a context; null where it is alone.
const Peers* peers_of(const Context& context);
// Why a rank is gone: another, or it itself, has left, or it waited for another in vain.
constexpr int64_t has_left(int rank) { return -1 - rank; }
constexpr int64_t did_not_come(int rank) { return 1 + rank; }

// Ranks on CUDA devices: made by backend/cuda/parallel, or refused by its absence (no_cuda.cpp).
// The options are sound.
namespace cuda {
Result<std::vector<std::unique_ptr<Peers>>> thread_peers(const CommunicatorOptions& options);
Result<std::unique_ptr<Peers>> nccl_peers(const CommunicatorOptions& options);
}  // namespace cuda

}  // namespace moire
