// The baseline of a GPU's benchmark: the same products through cuBLAS, one call each.
// cuBLAS is looked for when it is wanted, and is no part of the build.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "baseline.h"
#include "gpu.h"

namespace moire::tool {

class CuBlas {
 public:
  // Null where libcublas cannot be loaded.
  static std::unique_ptr<CuBlas> open(const Gpu& gpu);

  // The GEMMs of an op on operands of their own, all of its dtype, summed in FP32; each call of the
  // function enqueues them. Null if the op has none.
  std::function<Status()> products(Gpu& gpu, const Problem& problem) const;
  // One large product in BF16: 8192^3.
  std::function<Status()> dense(Gpu& gpu) const;
  static constexpr double kDenseFlops = 2.0 * 8192 * 8192 * 8192;

 private:
  using Handle = void*;  // of cublas_api.h, as the entry is
  using GemmEx = int (*)(Handle, int, int, int, int, int, const void*, const void*, int, int,
                         const void*, int, int, const void*, void*, int, int, int, int);

  std::function<Status()> multiplies(DType dtype, std::vector<Product> products) const;

  std::shared_ptr<void> library_, handle_;
  GemmEx gemm_ = nullptr;
};

}  // namespace moire::tool
