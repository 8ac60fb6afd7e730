#include "reference/float_format.h"

#include <cmath>
#include <cstdlib>
#include <limits>

namespace moire::reference {
namespace {

// Sign bit, exponent field and mantissa field of a format, from its numbers.
struct Fields {
  explicit Fields(FloatFormat f)
      : fraction((uint64_t{1} << f.mantissa_bits) - 1),
        all_ones(static_cast<uint64_t>(f.max_exponent - f.min_exponent) + 2),
        sign((all_ones + 1) << f.mantissa_bits) {}
  uint64_t fraction;  // mask of the mantissa field
  uint64_t all_ones;  // the exponent field of infinity and NaN
  uint64_t sign;      // mask of the sign bit
};

// No infinity: the largest exponent holds numbers, but for its last mantissa, NaN.
double decode_e4m3(uint64_t bits) {
  const auto exponent = static_cast<int>((bits >> 3) & 15);
  const auto fraction = static_cast<double>(bits & 7);
  const double sign = (bits & 0x80) != 0 ? -1.0 : 1.0;
  if ((bits & 0x7F) == 0x7F) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * fraction * 0x1p-9;
  return sign * (1 + fraction / 8) * std::ldexp(1.0, exponent - 7);
}

double decode_e8m0(uint64_t bits) {
  if (bits == 255) return std::numeric_limits<double>::quiet_NaN();
  return std::ldexp(1.0, static_cast<int>(bits) - 127);
}

}  // namespace

FloatFormat float_format(DType dtype) {
  switch (dtype) {
    case DType::kFP64:
      return {52, -1022, 1023};
    case DType::kFP32:
      return {23, -126, 127};
    case DType::kBF16:
      return {7, -126, 127};
    case DType::kFP16:
      return {10, -14, 15};
    case DType::kE5M2:
      return {2, -14, 15};
    default:
      std::abort();
  }
}

double decode(DType dtype, uint64_t bits) {
  if (dtype == DType::kE4M3) return decode_e4m3(bits);
  if (dtype == DType::kE8M0) return decode_e8m0(bits);
  const FloatFormat f = float_format(dtype);
  const Fields fields(f);
  const uint64_t exponent = (bits & (fields.sign - 1)) >> f.mantissa_bits;
  const auto fraction = static_cast<double>(bits & fields.fraction);
  const double sign = (bits & fields.sign) != 0 ? -1.0 : 1.0;
  if (exponent == fields.all_ones) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, f.min_exponent - f.mantissa_bits);
  const double significand = std::ldexp(1.0, f.mantissa_bits) + fraction;
  return sign *
         std::ldexp(significand, static_cast<int>(exponent) - 1 + f.min_exponent - f.mantissa_bits);
}

uint64_t encode(DType dtype, double value) {
  const FloatFormat f = float_format(dtype);
  const Fields fields(f);
  const uint64_t sign = std::signbit(value) ? fields.sign : 0;
  if (std::isnan(value)) return (fields.all_ones << f.mantissa_bits) | fields.fraction;
  if (std::isinf(value)) return sign | (fields.all_ones << f.mantissa_bits);
  if (value == 0) return sign;
  const int exponent = std::ilogb(value) < f.min_exponent ? f.min_exponent : std::ilogb(value);
  // In units of the last place: below 2^mantissa_bits it is subnormal and its exponent field is 0.
  const auto significand =
      static_cast<uint64_t>(std::ldexp(std::abs(value), f.mantissa_bits - exponent));
  const bool is_normal = significand > fields.fraction;
  const auto field = is_normal ? static_cast<uint64_t>(exponent - f.min_exponent + 1) : 0;
  return sign | (field << f.mantissa_bits) | (significand & fields.fraction);
}

}  // namespace moire::reference
