// The baseline that a benchmark is measured against in the same run: the same products through
// OpenBLAS, one cblas_sgemm per group and pass.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "problem.h"

namespace moire::tool {

// "OpenBLAS 0.3.21 (Zen)"; empty if this build has none.
std::string openblas_name();
void set_openblas_threads(int num_threads);

// The GEMMs of an op on FP32 operands of its own.
class OpenBlasBaseline {
 public:
  // Null if the op has no GEMM or the build no OpenBLAS.
  static std::unique_ptr<OpenBlasBaseline> create(const Problem& problem);
  void run() const;
  int64_t bytes() const { return bytes_; }

 private:
  struct Product {
    bool transpose_a, transpose_b;
    int64_t m, n, k;
    const float* a;
    int64_t a_stride;
    const float* b;
    int64_t b_stride;
    float* c;
  };
  enum class Pass { kForward, kDgrad, kWgrad };

  OpenBlasBaseline() : memory_(Memory::Backing::kPages) {}
  // One linear layer's operands; each is made when a pass first needs it.
  struct Layer {
    int64_t out, in;
    float *x = nullptr, *w = nullptr, *y = nullptr;
    float *grad_y = nullptr, *grad_x = nullptr, *grad_w = nullptr;
  };
  void add_pass(const Problem& problem, Pass pass, Layer& layer);
  float* normal(float*& data, int64_t elements);

  Memory memory_;
  std::vector<Product> products_;
  int64_t bytes_ = 0;
};

}  // namespace moire::tool
