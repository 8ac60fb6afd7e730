#include "reference/fp8.h"

#include <algorithm>
#include <cmath>

#include "reference/float_format.h"

namespace moire::reference {
namespace {

uint64_t max_code(DType dtype) { return dtype == DType::kE4M3 ? 0x7E : 0x7B; }

}  // namespace

double max_fp8(DType dtype) { return decode(dtype, max_code(dtype)); }

uint8_t encode_fp8(DType dtype, double value) {
  if (std::isnan(value)) return 0x7F;
  const uint64_t most = max_code(dtype), sign = std::signbit(value) ? 0x80 : 0;
  const double size = std::min(std::abs(value), max_fp8(dtype));
  // Codes ascend with their values: the last one not above, or the next if that is nearer, or as
  // near and even.
  uint64_t code = 0;
  for (uint64_t bit = 0x40; bit != 0; bit >>= 1) {
    if ((code | bit) <= most && decode(dtype, code | bit) <= size) code |= bit;
  }
  if (code != most) {
    const double below = size - decode(dtype, code), above = decode(dtype, code + 1) - size;
    if (above < below || (above == below && code % 2 == 1)) ++code;
  }
  return static_cast<uint8_t>(sign | code);
}

uint8_t fold_fp8(DType dtype, uint8_t element, uint8_t code, uint8_t folded) {
  if (code == 255) return 0x7F;
  const double value = decode(dtype, element);
  if (!std::isfinite(value)) return element;
  return encode_fp8(dtype, std::ldexp(value, code - folded));
}

}  // namespace moire::reference
