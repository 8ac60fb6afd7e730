#include "reference/number.h"

#include <algorithm>
#include <limits>

#include "reference/float_format.h"

namespace moire::reference {

double spacing(DType dtype, double value) {
  const FloatFormat f = float_format(dtype);
  const int exponent = value == 0 ? f.min_exponent : std::ilogb(value);
  return std::ldexp(1.0, std::max(exponent, f.min_exponent) - f.mantissa_bits);
}

double round_to(DType dtype, double value) {
  if (dtype == DType::kFP64 || value == 0 || !std::isfinite(value)) return value;
  const FloatFormat f = float_format(dtype);
  const double unit = spacing(dtype, value);
  const double rounded = std::nearbyint(value / unit) * unit;  // both exact: unit is a power of 2
  const double largest = std::ldexp(2.0 - std::ldexp(1.0, -f.mantissa_bits), f.max_exponent);
  if (std::abs(rounded) <= largest) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

Number round_to(DType dtype, Number number) {
  const double middle = round_to(dtype, number.value);
  const double low = round_to(dtype, number.value - number.bound);
  const double high = round_to(dtype, number.value + number.bound);
  if (low == high) return {middle, 0};
  return {middle, std::max(middle - low, high - middle)};
}

bool accepts(DType dtype, Number want, double got) {
  if (std::isnan(want.value)) return std::isnan(got);
  if (std::isinf(want.value)) return got == want.value;
  return round_to(dtype, want.value - want.bound) <= got &&
         got <= round_to(dtype, want.value + want.bound);
}

}  // namespace moire::reference
