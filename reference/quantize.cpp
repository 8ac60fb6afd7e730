#include "reference/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "reference/fp8.h"
#include "reference/grouped_gemm.h"
#include "reference/scaled.h"

namespace moire::reference {
namespace {

double fp32(double value) { return round_to(DType::kFP32, value); }

int64_t blocks_in(int64_t elements, int64_t block) { return (elements + block - 1) / block; }
int64_t bytes_per_scale(int32_t scaling) { return scaling == MOIRE_SCALING_MXFP8 ? 1 : 4; }

// The rows and columns of elements that share one scale.
std::pair<int64_t, int64_t> sides_of(int32_t scaling, int32_t direction) {
  const bool is_tile = scaling == MOIRE_SCALING_FP8_TILE;
  return {is_tile || direction == MOIRE_COLUMNWISE ? block_of(scaling) : 1,
          is_tile || direction == MOIRE_ROWWISE ? block_of(scaling) : 1};
}

// The least power of two that is not below t.
uint8_t round_up_to_e8m0(double t) {
  int code = 0;
  while (code < 254 && std::ldexp(1.0, code - 127) < t) ++code;
  return static_cast<uint8_t>(code);
}

// A scale as it is stored, and what elements are multiplied by.
struct Scale {
  uint8_t bytes[4];
  double multiplier;
};

Scale mx_scale(DType dtype, double amax) {
  const double t = fp32(amax * fp32(1 / max_fp8(dtype)));
  const uint8_t code = round_up_to_e8m0(t);
  return {{code}, std::ldexp(1.0, 127 - code)};
}

Scale block_scale(DType dtype, double amax, bool fractional) {
  double s = 1;
  if (amax != 0 && std::isfinite(amax)) {
    s = std::min(fp32(max_fp8(dtype) / amax), double{std::numeric_limits<float>::max()});
    if (!fractional) s = std::ldexp(1.0, std::ilogb(s));
  }
  Scale out{{}, s};
  const auto stored = static_cast<float>(fp32(1 / s));
  std::memcpy(out.bytes, &stored, sizeof(stored));
  return out;
}

// How a copy is quantised.
struct Recipe {
  DType dtype;
  int32_t scaling;
  bool fractional;
};

// Rows first ... first + rows - 1 and columns likewise: elements that share one scale.
struct Rectangle {
  int64_t row, rows, column, columns;
};

// Quantises the elements of a rectangle; their scale goes to scales [scale_row, scale_column].
void quantize_rectangle(const Matrix& values, const Recipe& recipe, const Rectangle& r,
                        int64_t scale_row, int64_t scale_column, QuantizedBytes& out) {
  double amax = 0;
  for (int64_t i = r.row; i < r.row + r.rows; ++i) {
    for (int64_t j = r.column; j < r.column + r.columns; ++j) {
      const double size = std::abs(values.at(i, j).value);
      if (size > amax) amax = size;  // NaN is not
    }
  }
  const Scale scale = recipe.scaling == MOIRE_SCALING_MXFP8
                          ? mx_scale(recipe.dtype, amax)
                          : block_scale(recipe.dtype, amax, recipe.fractional);
  const int64_t bytes = bytes_per_scale(recipe.scaling);
  std::copy(scale.bytes, scale.bytes + bytes, &out.scales.at(scale_row, scale_column * bytes));
  out.scales.is_owned[static_cast<size_t>(scale_row)] = true;
  for (int64_t i = r.row; i < r.row + r.rows; ++i) {
    out.data.is_owned[static_cast<size_t>(i)] = true;
    for (int64_t j = r.column; j < r.column + r.columns; ++j) {
      out.data.at(i, j) = encode_fp8(recipe.dtype, fp32(values.at(i, j).value * scale.multiplier));
    }
  }
}

// Rows [begin, end) are one group, or one matrix; scales that its rows share, columnwise ones and
// tiles', start at `shared_row`.
struct Span {
  int64_t begin, end, shared_row;
};

// What is quantised: its rows, the rows of scales where rows share them, and its parts.
struct Parts {
  int64_t rows, shared_rows;
  std::vector<Span> spans;

  int64_t rows_in_use() const { return spans.empty() ? 0 : spans.back().end; }
};

// A ragged [capacity, k].
Parts ragged(const moire_groups& groups, int32_t scaling) {
  const int64_t block = block_of(scaling), *offsets = groups.offsets;
  Parts out{groups.capacity, groups.capacity / block + groups.num_groups, {}};
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    out.spans.push_back({offsets[g], offsets[g + 1], offsets[g] / block + g});
  }
  return out;
}

// Matrices of n rows, one after the other.
Parts matrices(int64_t num_groups, int64_t n, int32_t scaling) {
  const int64_t blocks = blocks_in(n, block_of(scaling));
  Parts out{num_groups * n, num_groups * blocks, {}};
  for (int64_t g = 0; g < num_groups; ++g) out.spans.push_back({g * n, (g + 1) * n, g * blocks});
  return out;
}

// `values` are the rows in use.
QuantizedBytes quantize_parts(const Matrix& values, const Recipe& recipe, int32_t direction,
                              const Parts& parts) {
  const auto [high, wide] = sides_of(recipe.scaling, direction);
  QuantizedBytes out;
  out.data = ByteRows(parts.rows, values.columns);
  out.scales = ByteRows(high == 1 ? parts.rows : parts.shared_rows,
                        blocks_in(values.columns, wide) * bytes_per_scale(recipe.scaling));
  for (const auto& [begin, end, shared_row] : parts.spans) {
    for (int64_t i = begin; i < end; i += high) {
      const int64_t scale_row = high == 1 ? i : shared_row + (i - begin) / high;
      for (int64_t j = 0; j < values.columns; j += wide) {
        quantize_rectangle(values, recipe,
                           {i, std::min(high, end - i), j, std::min(wide, values.columns - j)},
                           scale_row, j / wide, out);
      }
    }
  }
  return out;
}

// Groups as given, or one of all rows, whose offsets are kept in `one`.
moire_groups resolve(const moire_groups& groups, int64_t rows, std::vector<int64_t>& one) {
  if (groups.offsets != nullptr || groups.num_groups != 0 || groups.capacity != 0) return groups;
  one = {0, rows};
  return {one.data(), 1, rows};
}

Parts parts_of(const TensorView& data, int32_t scaling, const moire_groups& groups) {
  return data.rank == 3 ? matrices(data.shape[0], data.shape[1], scaling) : ragged(groups, scaling);
}

// value = data * scale, rounded to FP32.
Matrix decode(const moire_quantized& q, int32_t scaling, int32_t direction, const Parts& parts) {
  const auto [high, wide] = sides_of(scaling, direction);
  Matrix out(parts.rows_in_use(), TensorView(q.data).columns());
  for (const auto& [begin, end, shared_row] : parts.spans) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t scale_row = high == 1 ? i : shared_row + (i - begin) / high;
      for (int64_t j = 0; j < out.columns; ++j) {
        const double scale = read_element(q.scales, scale_row, j / wide);
        out.at(i, j).value = fp32(read_element(q.data, i, j) * scale);
      }
    }
  }
  return out;
}

}  // namespace

QuantizeResults quantize(const moire_quantize_args& args) {
  const TensorView source(args.source), row_idx(args.row_idx);
  std::vector<int64_t> one;
  const moire_groups groups =
      resolve(args.groups, row_idx.is_present() ? row_idx.shape[0] : source.shape[0], one);
  const Matrix values = read_rows(source, row_idx, rows_in_use(groups));
  const auto copy = [&](const moire_quantized& q, int32_t direction) {
    if (!is_present(q)) return QuantizedBytes{};
    const Recipe recipe{TensorView(q.data).type(), args.scaling, args.fractional_scales != 0};
    return quantize_parts(values, recipe, direction, ragged(groups, args.scaling));
  };
  QuantizeResults out{
      copy(args.rowwise, MOIRE_ROWWISE), copy(args.columnwise, MOIRE_COLUMNWISE), {}};
  if (is_present(args.grad_bias)) {
    out.grad_bias = sum_rows(values, ones(values.rows), args.grad_bias,
                             {args.beta, args.beta_per_group}, groups);
  }
  return out;
}

QuantizeResults quantize_weight(const moire_quantize_weight_args& args) {
  const int64_t num_groups = args.source.tensor.shape[0], n = args.source.tensor.shape[1];
  Matrix values(num_groups * n, args.source.tensor.shape[2]);
  for (int64_t g = 0; g < num_groups; ++g) {
    const Matrix matrix = read_stored(args.source, g);
    std::copy(matrix.values.begin(), matrix.values.end(),
              values.values.begin() + g * n * values.columns);
  }
  const auto copy = [&](const moire_quantized& q, int32_t direction) {
    if (!is_present(q)) return QuantizedBytes{};
    const Recipe recipe{TensorView(q.data).type(), args.scaling, args.fractional_scales != 0};
    return quantize_parts(values, recipe, direction, matrices(num_groups, n, args.scaling));
  };
  return {copy(args.rowwise, MOIRE_ROWWISE), copy(args.columnwise, MOIRE_COLUMNWISE), {}};
}

QuantizedBytes requantize(const moire_requantize_args& args) {
  const TensorView data(args.source.data);
  std::vector<int64_t> one;
  const moire_groups groups = resolve(args.groups, data.num_rows(), one);
  const Parts parts = parts_of(data, args.scaling, groups);
  const Matrix values = decode(args.source, args.scaling, args.direction, parts);
  const Recipe recipe{TensorView(args.target.data).type(), args.scaling,
                      args.fractional_scales != 0};
  const int32_t direction = args.direction == MOIRE_ROWWISE ? MOIRE_COLUMNWISE : MOIRE_ROWWISE;
  return quantize_parts(values, recipe, direction, parts);
}

Matrix dequantize(const moire_dequantize_args& args) {
  std::vector<int64_t> one;
  const TensorView data(args.source.data);
  const moire_groups groups = resolve(args.groups, data.num_rows(), one);
  return decode(args.source, args.scaling, args.direction, parts_of(data, args.scaling, groups));
}

}  // namespace moire::reference
