#include "backend/cpu/gemm/emulated.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace moire::cpu::gemm {
namespace {

// Of a number other than zero; FP32 numbers and their products are normal in double.
int exponent(double x) {
  return static_cast<int>((std::bit_cast<uint64_t>(x) >> 52) & 0x7FF) - 1023;
}

// One MMA: up to 32 products of a row of floats with a column whose elements lie `pitch` apart.
double multiply_accumulate(double sum, const float* left, const float* right, int64_t pitch,
                           int64_t count) {
  double products[kMmaProducts];
  int largest = sum == 0 ? std::numeric_limits<int>::min() : exponent(sum);
  double plain = sum;  // infinite or NaN if any term is
  for (int64_t i = 0; i < count; ++i) {
    const double a = left[i], b = right[i * pitch];
    products[i] = a * b;
    plain += products[i];
    if (products[i] != 0) largest = std::max(largest, exponent(a) + exponent(b));
  }
  if (!std::isfinite(plain)) return plain;
  if (largest == std::numeric_limits<int>::min()) return 0;
  const double unit = std::ldexp(1.0, largest - kMmaFractionBits);
  double units = std::trunc(sum / unit);
  for (int64_t i = 0; i < count; ++i) units += std::trunc(products[i] / unit);
  return units * unit;
}

float multiply_column(const float* left, const float* right, int64_t pitch, int64_t kc) {
  float total = 0;
  for (int64_t promoted = 0; promoted < kc; promoted += kPromotedProducts) {
    double sum = 0;
    const int64_t end = std::min(promoted + kPromotedProducts, kc);
    for (int64_t k = promoted; k < end; k += kMmaProducts) {
      sum = multiply_accumulate(sum, left + k, right + k * pitch, pitch,
                                std::min(kMmaProducts, end - k));
    }
    total += static_cast<float>(sum);
  }
  return total;
}

void multiply(const float* const* left, int64_t num_rows, const float* right, int64_t num_columns,
              int64_t kc, const Target& target, const Upcoming&) {
  const Kernels& set = kernels();
  for (int64_t column = 0; column < num_columns; column += set.panel_width) {
    const int64_t columns = std::min(set.panel_width, num_columns - column);
    const int64_t pitch = (columns + set.lanes - 1) / set.lanes * set.lanes;
    const float* const panel = right + column * kc;
    for (int64_t r = 0; r < num_rows; ++r) {
      float* const sums = target.data + r * target.pitch + column;
      for (int64_t j = 0; j < columns; ++j) {
        const float sum = multiply_column(left[r], panel + j, pitch, kc);
        sums[j] = target.write == Write::kAdd ? sums[j] + sum : sum;
      }
    }
  }
}

}  // namespace

Kernels emulating(const Kernels& set) {
  Kernels emulated = set;
  emulated.multiply = multiply;
  return emulated;
}

}  // namespace moire::cpu::gemm
