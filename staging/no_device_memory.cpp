// A build without CUDA: there is nothing to stage on.
#include "staging/device_memory.h"

namespace moire::staging {
namespace {

Status none() { return {Code::kUnsupported, "staging: this build has no CUDA backend"}; }

}  // namespace

DeviceMemory::~DeviceMemory() = default;
Status DeviceMemory::reserve(size_t) { return none(); }
Status DeviceMemory::write(const std::byte*, size_t) const { return none(); }
Status DeviceMemory::read(std::byte*, size_t) const { return none(); }
int device_of_rank(int) { return 0; }
void* stream_of_rank(int) { return nullptr; }
void wait_for(void*) {}
Status copy_to_device(std::byte*, const std::byte*, size_t) { return none(); }
Status copy_to_host(std::byte*, const std::byte*, size_t) { return none(); }

}  // namespace moire::staging
