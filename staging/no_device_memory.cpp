// A build without CUDA: there is nothing to stage on.
#include "staging/device_memory.h"

namespace moire::staging {
namespace {

Status none() { return {Code::kUnsupported, "staging: this build has no CUDA backend"}; }

}  // namespace

DeviceMemory::~DeviceMemory() = default;
Status DeviceMemory::reserve(size_t) { return none(); }
Status copy_to_device(std::byte*, const std::byte*, size_t) { return none(); }
Status copy_to_host(std::byte*, const std::byte*, size_t) { return none(); }

}  // namespace moire::staging
