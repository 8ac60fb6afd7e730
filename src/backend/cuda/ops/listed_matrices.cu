#include <algorithm>

#include "backend/cuda/ops/listed_matrices.h"

namespace moire::cuda::ops {
namespace {

constexpr int64_t kMostAtOnce = ListedMatrices::kMostAtOnce;

struct Addresses {
  void* values[kMostAtOnce];
};

__global__ void __launch_bounds__(kMostAtOnce)
    write_addresses(const __grid_constant__ Addresses from, int64_t count, void** to) {
  if (threadIdx.x < count) to[threadIdx.x] = from.values[threadIdx.x];
}

}  // namespace

ListedMatrices::ListedMatrices(const moire_weight& w, Arena& arena)
    : list_(w.list),
      count_(w.list == nullptr ? 0 : w.tensor.shape[0]),
      addresses_(count_ == 0
                     ? nullptr
                     : static_cast<void**>(arena.take(product(count_, int64_t{sizeof(void*)})))) {}

void ListedMatrices::write(Launcher& launcher) const {
  for (int64_t first = 0; first < count_; first += kMostAtOnce) {
    const int64_t count = std::min(count_ - first, kMostAtOnce);
    Addresses chunk{};
    for (int64_t i = 0; i < count; ++i) chunk.values[i] = const_cast<void*>(list_[first + i]);
    launcher.launch(write_addresses, {1, kMostAtOnce}, chunk, count, addresses_ + first);
  }
}

std::string ListedMatrices::policy() const {
  if (count_ == 0) return {};
  return concat(", after writing the addresses of ", count_, " matrices");
}

}  // namespace moire::cuda::ops
