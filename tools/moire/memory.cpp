#include "memory.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace moire::tool {
namespace {

constexpr int64_t kGuardBytes = 256;  // a multiple of the alignment that workspaces ask for
constexpr int kGuardByte = 0xA5;

size_t mapped_bytes(int64_t bytes) { return static_cast<size_t>(bytes + 2 * kGuardBytes); }

bool is_guard(const unsigned char* p) {
  for (int64_t i = 0; i < kGuardBytes; ++i) {
    if (p[i] != kGuardByte) return false;
  }
  return true;
}

}  // namespace

Memory::~Memory() {
  for (const Block& b : blocks_) munmap(b.data - kGuardBytes, mapped_bytes(b.bytes));
}

void* Memory::take(const std::string& name, int64_t bytes) {
  void* base = mmap(nullptr, mapped_bytes(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  auto* data = static_cast<unsigned char*>(base) + kGuardBytes;
  if (guards_ == Guards::kWritten) {
    std::memset(data - kGuardBytes, kGuardByte, kGuardBytes);
    std::memset(data + bytes, kGuardByte, kGuardBytes);
  }
  blocks_.push_back({name, data, bytes});
  bytes_ += bytes;
  return data;
}

std::string Memory::first_broken_guard() const {
  if (guards_ == Guards::kNone) return "";
  for (const Block& b : blocks_) {
    if (!is_guard(b.data - kGuardBytes) || !is_guard(b.data + b.bytes)) return b.name;
  }
  return "";
}

}  // namespace moire::tool
