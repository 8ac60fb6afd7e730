#include "tests/support/allocations.h"

#include <cstdlib>
#include <new>

namespace {

thread_local int64_t allocations = 0;

void* allocate(size_t bytes, size_t alignment) {
  ++allocations;
  const size_t padded = (bytes + alignment - 1) / alignment * alignment;
  void* const memory = std::aligned_alloc(alignment, padded == 0 ? alignment : padded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

int64_t moire::test::num_allocations() { return allocations; }

// The other forms call these.
void* operator new(size_t bytes) { return allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
