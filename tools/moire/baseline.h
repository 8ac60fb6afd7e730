// The baseline that a benchmark is measured against in the same run: the same products through
// OpenBLAS, one cblas_sgemm each.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "products.h"

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
  int64_t bytes() const { return memory_.bytes(); }

 private:
  OpenBlasBaseline() : memory_(Memory::Backing::kPages) {}
  char* normal(int64_t elements);

  Memory memory_;
  std::vector<Product> products_;
};

}  // namespace moire::tool
