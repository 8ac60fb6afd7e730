#include "tests/support/allocations.h"

#include <cstdlib>
#include <limits>
#include <new>

namespace {

thread_local int64_t allocations = 0;
thread_local int64_t most = std::numeric_limits<int64_t>::max();

void* allocate(size_t bytes, size_t alignment) {
  if (++allocations > most) throw std::bad_alloc();
  const size_t padded = (bytes + alignment - 1) / alignment * alignment;
  void* const memory = std::aligned_alloc(alignment, padded == 0 ? alignment : padded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

int64_t moire::test::num_allocations() { return allocations; }

bool moire::test::runs_out_of_memory(int64_t n, const std::function<void()>& call) {
  struct Restore {
    ~Restore() { most = std::numeric_limits<int64_t>::max(); }
  };
  const int64_t limit = allocations + n;
  {
    const Restore restore;
    most = limit;
    call();
  }
  return allocations > limit;
}

// The other forms call these.
void* operator new(size_t bytes) { return allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
