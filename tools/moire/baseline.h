// The baseline that a benchmark is measured against in the same run: the products of an op as a
// BLAS gets them, one call per group and pass, on operands of their own; and OpenBLAS, which makes
// them by one cblas_sgemm each.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "problem.h"

namespace moire::tool {

// c [m, n] = op(a) op(b), row-major and contiguous.
struct Product {
  bool transpose_a, transpose_b;
  int64_t m, n, k;
  const void *a, *b;
  void* c;

  int64_t columns_a() const { return transpose_a ? m : k; }
  int64_t columns_b() const { return transpose_b ? k : n; }
};

// None where the op has none. Weights are [G, out, in], rows are in expert order: the layout that
// suits BLAS best. `take` gives memory for so many elements, normal numbers.
std::vector<Product> products_of(const Problem& problem, int64_t element_bytes,
                                 const std::function<char*(int64_t elements)>& take);

// "OpenBLAS 0.3.21 (Zen)"; empty if this build has none.
std::string openblas_name();
void set_openblas_threads(int num_threads);
// In FP32.
void openblas_multiply(const Product& product);

}  // namespace moire::tool
