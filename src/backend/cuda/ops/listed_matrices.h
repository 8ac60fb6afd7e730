// Listed weights as kernels find them: an array in the workspace, of the addresses of the groups'
// matrices. A kernel that has them among its parameters writes it, so that a captured graph reads
// no memory of the host.
#pragma once

#include "backend/cuda/runtime/launch.h"
#include "core/arena.h"

namespace moire::cuda::ops {

class ListedMatrices {
 public:
  static constexpr int64_t kMostAtOnce = 256;  // a kernel's parameters have 4 KiB

  // Takes its part of the workspace where the weight is a list.
  ListedMatrices(const moire_weight& w, Arena& arena);

  // On the device, after write(); null: the weight is packed.
  void* const* addresses() const { return addresses_; }
  void write(Launcher& launcher) const;

  // For explain: what comes before the kernel, in words and in launches.
  std::string policy() const;
  int64_t launches() const { return ceil_div(count_, kMostAtOnce); }

 private:
  const void* const* list_;  // on the host
  int64_t count_;
  void** addresses_;
};

}  // namespace moire::cuda::ops
