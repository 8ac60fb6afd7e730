// Grants: how much each address (a kernel) was given of something, at most, so that it is asked for
// once and not at every use. Any number of threads; a look-up takes no lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace moire::cuda {

class Grants {
 public:
  // Calls give(), which says whether it did, unless `address` has as much already. Two threads
  // never give at once, so that what one gives is not taken back by the other's smaller amount.
  template <class Give>
  void need(const void* address, size_t amount, Give&& give) {
    if (has(address, amount)) return;
    const std::lock_guard lock(mutex_);
    if (has(address, amount) || !give()) return;
    Slot* const slot = slot_of(address);
    if (slot == nullptr) return;
    slot->amount.store(amount, std::memory_order_release);
    slot->address.store(address, std::memory_order_release);
  }

  // Addresses past so many are given to each time.
  static constexpr size_t kMost = 512;

 private:
  struct Slot {
    std::atomic<const void*> address;
    std::atomic<size_t> amount;
  };

  // The address's slot, or the first that is free; null if there is neither.
  Slot* slot_of(const void* address) {
    for (size_t i = 0, first = reinterpret_cast<uintptr_t>(address) / 16; i < kMost; ++i) {
      Slot& slot = slots_[(first + i) % kMost];
      const void* const found = slot.address.load(std::memory_order_acquire);
      if (found == address || found == nullptr) return &slot;
    }
    return nullptr;
  }
  // A slot that was free may be another address's by now.
  bool has(const void* address, size_t amount) {
    const Slot* const slot = slot_of(address);
    return slot != nullptr && slot->address.load(std::memory_order_acquire) == address &&
           slot->amount.load(std::memory_order_acquire) >= amount;
  }

  Slot slots_[kMost] = {};
  std::mutex mutex_;
};

}  // namespace moire::cuda
