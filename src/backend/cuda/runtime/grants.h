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
    if (!has(address, amount) && give()) note(address, amount);
  }

  // Addresses past so many are given to each time.
  static constexpr size_t kMost = 512;

 private:
  struct Slot {
    std::atomic<const void*> address;
    std::atomic<size_t> amount;
  };

  // Slots are looked through from here on, to the first that is free.
  static size_t first_slot(const void* address) {
    return reinterpret_cast<uintptr_t>(address) / 16 % kMost;
  }
  bool has(const void* address, size_t amount) const {
    for (size_t i = first_slot(address), end = i + kMost; i < end; ++i) {
      const Slot& slot = slots_[i % kMost];
      const void* const found = slot.address.load(std::memory_order_acquire);
      if (found == address) return slot.amount.load(std::memory_order_acquire) >= amount;
      if (found == nullptr) break;
    }
    return false;
  }
  void note(const void* address, size_t amount) {
    for (size_t i = first_slot(address), end = i + kMost; i < end; ++i) {
      Slot& slot = slots_[i % kMost];
      const void* const found = slot.address.load(std::memory_order_relaxed);
      if (found != address && found != nullptr) continue;
      slot.amount.store(amount, std::memory_order_release);
      slot.address.store(address, std::memory_order_release);
      return;
    }
  }

  Slot slots_[kMost] = {};
  std::mutex mutex_;
};

}  // namespace moire::cuda
