// The baseline that a benchmark is measured against in the same run: the same products through
// OpenBLAS, one cblas_sgemm each.
#pragma once

#include <string>

#include "products.h"

namespace moire::tool {

// "OpenBLAS 0.3.21 (Zen)"; empty if this build has none.
std::string openblas_name();
void set_openblas_threads(int num_threads);
// In FP32.
void openblas_multiply(const Product& product);

}  // namespace moire::tool
