// Why an SM90 implementation refuses a call: each function gives a sentence, or nothing where all
// is well.
#pragma once

#include "backend/implementation.h"
#include "core/glu_layout.h"

namespace moire::cuda::sm90 {

// A tensor as sentences call it; absent ones are fine.
struct Named {
  std::string_view name;
  TensorView tensor;
};

std::string why_not_device(const DeviceState& state);
std::string why_not_type(DType type, std::initializer_list<Named> tensors);
std::string why_not_gradient(const TensorView& d);  // of weights
// FP8 tensor cores: only where their sums may be used, for operands of FP8 in words of four.
std::string why_not_fast(int32_t accumulation);
std::string why_not_fp8(std::initializer_list<Named> tensors);
std::string why_not_words(std::initializer_list<Named> tensors);
// TMA needs addresses and row strides that are multiples of 16 bytes.
std::string why_not_tma(std::initializer_list<Named> tensors);
// A list's matrices besides must be numbers of one map (Matrices).
std::string why_not_listed(std::string_view name, const Weight& w);
// Of weights [G, ., .]: capacity is counted in 30 bits, their dimensions and the tiles in 31; no
// dimension is zero.
std::string why_not_sizes(const Groups& groups, const TensorView& weights);
// The block must divide a tile's 128 rows of gate or be a multiple of them, or be F.
std::string why_not_layout(const ResolvedGluLayout& layout);
std::string why_not_z(const TensorView& z, const ResolvedGluLayout& layout);

// The first sentence that is not empty.
Reason first_of(std::initializer_list<std::string> sentences);

}  // namespace moire::cuda::sm90
