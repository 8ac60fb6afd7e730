#include "backend/cpu/gemm/emulated.h"

#include "core/fp8.h"

namespace moire::cpu::gemm {
namespace {

template <class Format>
void fold(const uint8_t* codes, const uint8_t* scales, uint8_t folded, int64_t n, float* target) {
  for (int64_t i = 0; i < n; ++i) {
    target[i] = fp8_to_float<Format>(fold_element<Format>(codes[i], scales[i / 32], folded));
  }
}

Fp8Elements elements(const Fp8Vectors& operand, const float* vectors, int64_t i) {
  const bool is_e4m3 = operand.matrix.dtype() == DType::kE4M3;
  return {vectors + i * kPromotedProducts, 1 - (is_e4m3 ? E4M3::kBias : E5M2::kBias)};
}

}  // namespace

float Fp8Vectors::read(int64_t vector, int64_t k, int64_t n, float* target) const {
  const Fp8Row from = row(vector, k);
  const auto scale_at = [&](int64_t v, int64_t at, int64_t block) {
    const int64_t column = k_is_last ? at : v;
    return from.scale_per_column ? column : column / block;
  };
  uint8_t codes[kPromotedProducts], scales[4] = {}, folded = 0;
  for (int64_t i = 0; i < n; ++i) codes[i] = row(vector, k + i).data[k_is_last ? k + i : vector];
  const bool folds = from.scale_dtype == DType::kE8M0;
  const int64_t first = tiled == 0 ? vector : vector / 128 * 128;
  const int64_t end = tiled == 0 ? vector + 1 : std::min(first + 128, tiled);
  for (int64_t i = 0; folds && i < n; i += 32) {
    for (int64_t v = first; v < end; ++v) {
      const auto* of_row = static_cast<const uint8_t*>(row(v, k + i).scales);
      const uint8_t code = of_row[scale_at(v, k + i, 32)];
      folded = fold_code(folded, code);
      if (v == vector) scales[i / 32] = code;
    }
  }
  (from.dtype == DType::kE4M3 ? fold<E4M3> : fold<E5M2>)(codes, scales, folded, n, target);
  return folds ? e8m0_to_float(folded)
               : static_cast<const float*>(from.scales)[scale_at(vector, k, 128)];
}

void emulate(const Fp8Vectors& left, const Fp8Vectors& right, int64_t num_k, const Columns& columns,
             const Tile& tile, const Scratch& scratch) {
  const int64_t num_columns = tile.columns * columns.per_output(), pitch = sums_pitch(num_columns);
  const int64_t first_column = tile.first_column * columns.per_output();
  float* const left_scales = scratch.left + tile.rows * kPromotedProducts;
  float* const right_scales = scratch.panels + num_columns * kPromotedProducts;
  std::fill_n(scratch.sums, tile.rows * pitch, 0.0F);
  for (int64_t k = 0; k < num_k; k += kPromotedProducts) {
    const int64_t n = std::min(kPromotedProducts, num_k - k);
    for (int64_t i = 0; i < tile.rows; ++i) {
      float* const target = scratch.left + i * kPromotedProducts;
      left_scales[i] = left.read(tile.first_row + i, k, n, target);
    }
    for (int64_t j = 0; j < num_columns; ++j) {
      float* const target = scratch.panels + j * kPromotedProducts;
      right_scales[j] = right.read(columns.source(first_column + j), k, n, target);
    }
    for (int64_t i = 0; i < tile.rows; ++i) {
      const Fp8Elements a = elements(left, scratch.left, i);
      for (int64_t j = 0; j < num_columns; ++j) {
        const float sum = sum_products(a, elements(right, scratch.panels, j), n);
        float& total = scratch.sums[i * pitch + j];
        total = promote(total, sum, left_scales[i], right_scales[j]);
      }
    }
  }
}

}  // namespace moire::cpu::gemm
