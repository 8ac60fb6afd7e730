#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "commands.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int64_t kGuardBytes = 256;  // a multiple of the alignment that workspaces ask for
constexpr int kGuardByte = 0xFF;      // NaN, so that what is read there shows as well
// From here on the kernel is asked for huge pages: touching gigabytes page by page takes seconds.
constexpr int64_t kManyBytes = int64_t{16} << 20;
// Where addresses without backing begin, and how many bytes there may be: a sum that fits int64_t.
constexpr uintptr_t kFirstAddress = uintptr_t{1} << 48;
constexpr int64_t kMostBytes = int64_t{1} << 60;

size_t mapped_bytes(int64_t bytes) { return static_cast<size_t>(bytes + 2 * kGuardBytes); }

bool is_guard(const unsigned char* p) {
  return std::all_of(p, p + kGuardBytes, [](unsigned char byte) { return byte == kGuardByte; });
}

}  // namespace

Memory::~Memory() {
  for (const Block& b : blocks_) munmap(b.data - kGuardBytes, mapped_bytes(b.bytes));
}

void* Memory::take(const std::string& name, int64_t bytes) {
  if (bytes > kMostBytes - bytes_) {
    throw UsageError("found operands of more than ", human_bytes(kMostBytes), " (", name,
                     " is one), needed fewer bytes than there are addresses; --set rows=64 "
                     "--set groups=8 makes it smaller");
  }
  if (backing_ == Backing::kNone) {
    const int64_t first = (bytes_ + kGuardBytes - 1) / kGuardBytes * kGuardBytes;
    bytes_ = first + bytes;
    return std::bit_cast<void*>(kFirstAddress + static_cast<uintptr_t>(first));
  }
  void* base = mmap(nullptr, mapped_bytes(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  if (bytes >= kManyBytes) madvise(base, mapped_bytes(bytes), MADV_HUGEPAGE);  // a hint
  auto* data = static_cast<unsigned char*>(base) + kGuardBytes;
  std::memset(data - kGuardBytes, kGuardByte, kGuardBytes);
  std::memset(data + bytes, kGuardByte, kGuardBytes);
  blocks_.push_back({name, data, bytes});
  bytes_ += bytes;
  return data;
}

std::string Memory::first_broken_guard() const {
  for (const Block& b : blocks_) {
    if (!is_guard(b.data - kGuardBytes) || !is_guard(b.data + b.bytes)) return b.name;
  }
  return "";
}

}  // namespace moire::tool
