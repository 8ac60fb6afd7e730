#include "tests/fuzz/memory.h"

#include <algorithm>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) (static_cast<void>(address))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) (static_cast<void>(address))
#endif

namespace moire::fuzz {
namespace {

constexpr size_t kGuardBytes = 512;
constexpr std::byte kGuard{0xA5}, kPoison{0xFF};

}  // namespace

void* Memory::take(const std::string& name, int64_t bytes, int64_t alignment) {
  const auto size = static_cast<size_t>(bytes), unit = static_cast<size_t>(alignment);
  Block& block = blocks_.emplace_back();
  block.name = name;
  block.bytes = size;
  block.storage.assign(size + 2 * kGuardBytes + 2 * unit, kGuard);
  const auto base = reinterpret_cast<uintptr_t>(block.storage.data()) + kGuardBytes;
  uintptr_t address = (base + unit - 1) / unit * unit;
  if (address % (2 * unit) == 0) address += unit;
  block.begin = address - reinterpret_cast<uintptr_t>(block.storage.data());
  std::fill_n(block.storage.begin() + static_cast<ptrdiff_t>(block.begin), size, kPoison);
  return block.storage.data() + block.begin;
}

void Memory::guard(const Block& block, bool may_be_read) {
  const std::byte* const first = block.storage.data();
  const std::byte* const end = first + block.begin + block.bytes;
  if (may_be_read) {
    ASAN_UNPOISON_MEMORY_REGION(first, block.storage.size());
  } else {
    ASAN_POISON_MEMORY_REGION(first, block.begin);
    ASAN_POISON_MEMORY_REGION(end, first + block.storage.size() - end);
  }
}

void Memory::remember() {
  for (Block& block : blocks_) {
    block.remembered = block.storage;
    guard(block, false);
  }
}

void Memory::restore() {
  for (Block& block : blocks_) {
    guard(block, true);
    std::copy(block.remembered.begin(), block.remembered.end(), block.storage.begin());
    guard(block, false);
  }
}

Complaint Memory::damage() const {
  for (const Block& block : blocks_) {
    guard(block, true);
    const auto is_guard = [](std::byte b) { return b == kGuard; };
    const auto first = block.storage.begin();
    const auto begin = first + static_cast<ptrdiff_t>(block.begin);
    const auto end = begin + static_cast<ptrdiff_t>(block.bytes);
    const bool is_sound =
        std::all_of(first, begin, is_guard) && std::all_of(end, block.storage.end(), is_guard);
    guard(block, false);
    if (!is_sound) return "bytes beside " + block.name + " were written";
  }
  return {};
}

bool Memory::is_unchanged(const void* data, int64_t bytes) const {
  const auto* const at = static_cast<const std::byte*>(data);
  for (const Block& block : blocks_) {
    const std::byte* const begin = block.storage.data() + block.begin;
    if (at < begin || at >= begin + block.bytes) continue;
    const auto offset = static_cast<size_t>(at - block.storage.data());
    const auto end = block.begin + block.bytes;
    const size_t count = std::min(static_cast<size_t>(bytes), end - offset);
    return std::memcmp(at, block.remembered.data() + offset, count) == 0;
  }
  return true;
}

}  // namespace moire::fuzz
