// The baseline of a GPU's benchmark: the same products through cuBLAS, one call each.
// cuBLAS is looked for when it is wanted, and is no part of the build.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu.h"
#include "products.h"

namespace moire::tool {

class CuBlas {
 public:
  // Null where libcublas cannot be loaded.
  static std::unique_ptr<CuBlas> open(const Gpu& gpu);
  ~CuBlas();

  // All of one dtype, summed in FP32.
  Status multiply(DType dtype, const Product& product) const;
  // One large product, enqueued by each call of the function: 8192^3.
  std::function<Status()> dense(Gpu& gpu, DType dtype) const;
  static constexpr double kDenseFlops = 2.0 * 8192 * 8192 * 8192;
  // Its FLOP/s in a few calls.
  double dense_rate(Gpu& gpu, DType dtype) const;

 private:
  struct Entries;
  explicit CuBlas(std::unique_ptr<Entries> entries);
  std::unique_ptr<Entries> entries_;
};

// The GEMMs of an op on operands of its own.
class CuBlasBaseline {
 public:
  // Null if the op has no GEMM.
  static std::unique_ptr<CuBlasBaseline> create(const CuBlas& blas, Gpu& gpu,
                                                const Problem& problem);
  Status enqueue() const;

 private:
  CuBlasBaseline(const CuBlas& blas, DType dtype) : blas_(blas), dtype_(dtype) {}

  const CuBlas& blas_;
  DType dtype_;
  std::vector<Product> products_;
};

}  // namespace moire::tool
