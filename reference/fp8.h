// FP8 codes from values, by definition and in double; decode() of float_format.h is the way back.
#pragma once

#include <moire/tensor.h>

#include <cstdint>

namespace moire::reference {

// The largest number of E4M3 or E5M2.
double max_fp8(DType dtype);
// The nearest code, ties to even; past the largest number that number; 0x7F for every NaN.
uint8_t encode_fp8(DType dtype, double value);
// What an element of an MXFP8 block with this E8M0 code is where `folded` is its block's code
// instead: the nearest code, infinity and NaN themselves.
uint8_t fold_fp8(DType dtype, uint8_t element, uint8_t code, uint8_t folded);

}  // namespace moire::reference
