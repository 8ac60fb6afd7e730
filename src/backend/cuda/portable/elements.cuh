// What the tensor cores' engine (mma.cuh) is given eight elements of: those of 16 bits as they are,
// FP8 ones decoded into BF16, which has every value of theirs.
//
// MXFP8 scales are applied there, for a power of two moves a BF16 number onto another: exactly,
// where data * scale is one. Below 2^-133 none is, and what is lost lies within the bound of
// docs/numerics.md. Scales of 128 elements need not be powers of two: they are applied to sums of
// 128 products, in FP32.
#pragma once

#include "backend/cuda/portable/operand.cuh"

namespace moire::cuda::portable::gemm {

inline constexpr int kPiece = 8;  // elements that are fetched at once
using Values = Packed<uint16_t, kPiece>;

// `Raw` elements are fetched. kScalesElements: values() needs the scale of each.
// kScalesSums: sums of kScaledSums products are scaled.
template <class T>
struct Floats16 {
  static constexpr const char* kName = "16-bit tensor cores";
  static constexpr bool kScalesElements = false, kScalesSums = false;
  using Raw = uint16_t;
  using Product = T;

  template <class Scale>
  __device__ static Values values(const Operand&, const Packed<Raw, kPiece>& raw, const Scale&) {
    return raw;
  }
};

template <bool kScaled>
struct Fp8Elements {
  using Raw = uint8_t;
  using Product = __nv_bfloat16;

  // `scale(i)` is that of element i.
  template <class Scale>
  __device__ static Values values(const Operand& operand, const Packed<Raw, kPiece>& raw,
                                  const Scale& scale) {
    Packed<__nv_bfloat16, kPiece> values;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const float v = operand.decoded(raw.values[i]);
      values.set(i, kScaled ? v * scale(i) : v);
    }
    return bit_cast<Values>(values);
  }
};
struct MxElements : Fp8Elements<true> {
  static constexpr const char* kName = "MXFP8 decoded for 16-bit tensor cores";
  static constexpr bool kScalesElements = true, kScalesSums = false;
};
struct BlockElements : Fp8Elements<false> {
  static constexpr const char* kName =
      "FP8 decoded for 16-bit tensor cores, sums of 128 products scaled";
  static constexpr bool kScalesElements = false, kScalesSums = true;
};
inline constexpr int64_t kScaledSums = 128;

}  // namespace moire::cuda::portable::gemm
