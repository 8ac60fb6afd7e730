// The baseline of a GPU's benchmark: the same products through cuBLAS, one call per group and pass.
// cuBLAS is looked for when it is wanted, and is no part of the build.
#pragma once

#include <moire/tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu.h"
#include "problem.h"

namespace moire::tool {

class CuBlas {
 public:
  // Null where libcublas cannot be loaded.
  static std::unique_ptr<CuBlas> open(const Gpu& gpu);
  ~CuBlas();

  // c [m, n] = op(a) op(b), row-major, contiguous, all of one dtype, summed in FP32.
  Status multiply(DType dtype, bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k,
                  const void* a, const void* b, void* c) const;
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
  struct Product {
    bool transpose_a, transpose_b;
    int64_t m, n, k;
    const void *a, *b;
    void* c;
  };
  CuBlasBaseline(const CuBlas& blas, DType dtype) : blas_(blas), dtype_(dtype) {}
  void add_linear(Gpu& gpu, const Problem& problem, int64_t out, int64_t in, bool forward,
                  bool dgrad, bool wgrad);

  const CuBlas& blas_;
  DType dtype_;
  std::vector<Product> products_;
};

}  // namespace moire::tool
