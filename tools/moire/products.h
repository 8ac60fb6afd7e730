// The products of an op as a BLAS gets them, the baseline of `moire bench`: one call per group and
// pass, on operands of their own.
#pragma once

#include <cstdint>
#include <functional>
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

}  // namespace moire::tool
