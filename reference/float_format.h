// The binary floating-point formats by their three numbers, and their bit patterns by definition.
#pragma once

#include <moire/tensor.h>

#include <cstdint>

namespace moire::reference {

// A normal value is (1 + fraction / 2^mantissa_bits) * 2^exponent; subnormal ones are multiples of
// 2^(min_exponent - mantissa_bits). The all-ones exponent field holds infinity and NaN.
struct FloatFormat {
  int mantissa_bits;
  int min_exponent;
  int max_exponent;
};

// FP64, FP32, BF16, FP16, E5M2; anything else is a defect of the caller and aborts.
FloatFormat float_format(DType dtype);

// Bit pattern to value (of E4M3 and E8M0 too), and a value that the format holds exactly (see
// round_to) to its pattern.
double decode(DType dtype, uint64_t bits);
uint64_t encode(DType dtype, double value);

}  // namespace moire::reference
