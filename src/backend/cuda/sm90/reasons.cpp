#include "backend/cuda/sm90/reasons.h"

#include <algorithm>

#include "backend/cuda/runtime/tensor_map.h"
#include "core/format.h"
#include "core/scales_check.h"

namespace moire::cuda::sm90 {

std::string why_not_device(const DeviceState& state) {
  if (state.compute_capability == 90) return {};
  return concat("this GPU has compute capability ", state.compute_capability / 10, ".",
                state.compute_capability % 10, ", the kernel is for 9.0");
}

std::string why_not_type(DType type, std::initializer_list<Named> tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.is_present() || tensor.type() == type) continue;
    return concat(name, " is ", dtype_name(tensor.type()), ", the kernel takes ", dtype_name(type));
  }
  return {};
}

std::string why_not_gradient(const TensorView& d) {
  if (d.type() == DType::kFP32 || d.type() == DType::kBF16) return {};
  return concat("d is ", dtype_name(d.type()), ", the kernel stores fp32 and bf16");
}

std::string why_not_fast(int32_t accumulation) {
  if (accumulation == MOIRE_ACCUMULATE_FAST) return {};
  return "exact sums are asked for, FP8 tensor cores keep about 13 bits";
}

std::string why_not_fp8(std::initializer_list<Named> tensors) {
  for (const auto& [name, codes] : tensors) {
    if (is_fp8(codes)) continue;
    return concat(name, " is ", dtype_name(codes.type()), ", FP8 tensor cores take e4m3 and e5m2");
  }
  return {};
}

std::string why_not_words(std::initializer_list<Named> tensors) {
  for (const auto& [name, codes] : tensors) {
    if (codes.columns() % 4 == 0) continue;
    return concat(name, " has ", codes.columns(), " columns, the kernel takes multiples of 4");
  }
  return {};
}

std::string why_not_tma(std::initializer_list<Named> tensors) {
  constexpr int64_t kAlignment = 16;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.is_present()) continue;
    if (reinterpret_cast<uintptr_t>(tensor.data) % kAlignment != 0) {
      return concat(name, " is not aligned to 16 bytes, which TMA needs");
    }
    const int64_t row_bytes = tensor.stride() * dtype_size(tensor.type());
    if (row_bytes % kAlignment != 0) {
      return concat("rows of ", name, " lie ", row_bytes,
                    " bytes apart, which for TMA must be a multiple of 16");
    }
  }
  return {};
}

std::string why_not_listed(std::string_view name, const Weight& w) {
  if (w.list == nullptr || TensorView(w.tensor).num_elements() == 0) return {};
  for (int64_t g = 0; g < w.tensor.shape[0]; ++g) {
    if (reinterpret_cast<uintptr_t>(w.list[g]) % 16 == 0) continue;
    return why_not_tma({{concat(name, "[", g, "]"), w.matrix(g)}});
  }
  const Matrices matrices(w);
  if (matrices.reach_all()) return {};
  return concat("the matrices of ", name, " lie ", matrices.span, " bytes apart at multiples of ",
                matrices.distance, ", of which the kernel counts 2^31");
}

std::string why_not_sizes(const Groups& groups, const TensorView& weights) {
  const int64_t sizes[] = {weights.shape[1], weights.shape[2]};
  if (groups.num_groups == 0)
    return "there are no groups, the kernel maps the weights of one or more";
  if (groups.capacity > int64_t{1} << 30) {
    return concat("the capacity is ", groups.capacity, ", the kernel counts to 2^30");
  }
  for (const int64_t size : sizes) {
    if (size <= 0 || size >= int64_t{1} << 31) {
      return concat("a dimension is ", size, ", the kernel takes 1 to 2^31 - 1");
    }
  }
  // Tiles are numbered in 31 bits: those of any splits, of the smallest tile.
  constexpr int64_t kTile = 64;
  const auto tiles = [](int64_t n) { return ceil_div(n, kTile); };
  const int64_t first = tiles(sizes[0]), second = tiles(sizes[1]);
  const double ragged_m = static_cast<double>(tiles(groups.capacity) + groups.num_groups + 1) *
                          static_cast<double>(std::max(first, second));
  const double ragged_k = static_cast<double>(groups.num_groups) * static_cast<double>(first) *
                          static_cast<double>(second);
  if (std::max(ragged_m, ragged_k) >= 0x1p31) {
    return "there are more than 2^31 tiles, which is as far as the kernel counts";
  }
  return {};
}

std::string why_not_layout(const ResolvedGluLayout& layout) {
  constexpr int64_t kTileRows = 128;
  if (layout.block == layout.f || kTileRows % layout.block == 0 || layout.block % kTileRows == 0) {
    return {};
  }
  return concat("layout.block is ", layout.block,
                ", the kernel takes halves, divisors of 128 and multiples of 128");
}

std::string why_not_z(const TensorView& z, const ResolvedGluLayout& layout) {
  if (!z.is_present() || layout.block != layout.f || layout.f % 8 == 0) return {};
  return concat("z's halves lie ", 2 * layout.f,
                " bytes apart, which for TMA must be a multiple of 16");
}

Reason first_of(std::initializer_list<std::string> sentences) {
  for (const std::string& sentence : sentences) {
    if (!sentence.empty()) return sentence;
  }
  return std::nullopt;
}

}  // namespace moire::cuda::sm90
