#include "reference/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "reference/fp8.h"
#include "reference/grouped_gemm.h"

namespace moire::reference {
namespace {

double fp32(double value) { return round_to(DType::kFP32, value); }

int64_t blocks_in(int64_t elements, int64_t block) { return (elements + block - 1) / block; }
int64_t block_of(int32_t scaling) { return scaling == MOIRE_SCALING_MXFP8 ? 32 : 128; }
int64_t bytes_per_scale(int32_t scaling) { return scaling == MOIRE_SCALING_MXFP8 ? 1 : 4; }

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

// Rows [begin, end) of the values are one group, or one matrix; `columnwise_row` is where its
// columnwise scales, or its tiles', start.
void quantize_rows(const Matrix& values, const Recipe& recipe, int32_t direction, int64_t begin,
                   int64_t end, int64_t columnwise_row, QuantizedBytes& out) {
  const bool is_tile = recipe.scaling == MOIRE_SCALING_FP8_TILE;
  const int64_t block = block_of(recipe.scaling);
  const int64_t high = is_tile || direction == MOIRE_COLUMNWISE ? block : 1;
  const int64_t wide = is_tile || direction == MOIRE_ROWWISE ? block : 1;
  for (int64_t i = begin; i < end; i += high) {
    const int64_t scale_row = high == 1 ? i : columnwise_row + (i - begin) / block;
    for (int64_t j = 0; j < values.columns; j += wide) {
      quantize_rectangle(values, recipe,
                         {i, std::min(high, end - i), j, std::min(wide, values.columns - j)},
                         scale_row, j / wide, out);
    }
  }
}

// A ragged [capacity, k] of which `values` are the rows in use.
QuantizedBytes quantize_ragged(const Matrix& values, const Recipe& recipe, int32_t direction,
                               const moire_groups& groups) {
  const int64_t block = block_of(recipe.scaling), bytes = bytes_per_scale(recipe.scaling);
  QuantizedBytes out;
  out.data = ByteRows(groups.capacity, values.columns);
  out.scales = direction == MOIRE_ROWWISE
                   ? ByteRows(groups.capacity, blocks_in(values.columns, block) * bytes)
                   : ByteRows(groups.capacity / block + groups.num_groups, values.columns * bytes);
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    quantize_rows(values, recipe, direction, groups.offsets[g], groups.offsets[g + 1],
                  groups.offsets[g] / block + g, out);
  }
  return out;
}

// `values` are the rows of num_groups matrices of n rows.
QuantizedBytes quantize_matrices(const Matrix& values, const Recipe& recipe, int32_t direction,
                                 int64_t num_groups, int64_t n) {
  const int64_t block = block_of(recipe.scaling), bytes = bytes_per_scale(recipe.scaling);
  const bool is_tile = recipe.scaling == MOIRE_SCALING_FP8_TILE;
  const bool by_rows = !is_tile && direction == MOIRE_ROWWISE;
  const int64_t scale_columns =
      is_tile || direction == MOIRE_ROWWISE ? blocks_in(values.columns, block) : values.columns;
  QuantizedBytes out;
  out.data = ByteRows(num_groups * n, values.columns);
  out.scales = ByteRows(num_groups * (by_rows ? n : blocks_in(n, block)), scale_columns * bytes);
  for (int64_t g = 0; g < num_groups; ++g) {
    quantize_rows(values, recipe, direction, g * n, (g + 1) * n, g * blocks_in(n, block), out);
  }
  return out;
}

// Groups as given, or one of all rows, whose offsets are kept in `one`.
moire_groups resolve(const moire_groups& groups, int64_t rows, std::vector<int64_t>& one) {
  if (groups.offsets != nullptr || groups.num_groups != 0 || groups.capacity != 0) return groups;
  one = {0, rows};
  return {one.data(), 1, rows};
}

// Rows [begin, end) decoded: value = data * scale, rounded to FP32.
void decode_rows(const moire_quantized& q, int32_t scaling, int32_t direction, int64_t begin,
                 int64_t end, int64_t columnwise_row, Matrix& out) {
  const bool is_tile = scaling == MOIRE_SCALING_FP8_TILE;
  const int64_t block = block_of(scaling);
  const TensorView data(q.data), scales(q.scales);
  for (int64_t i = begin; i < end; ++i) {
    const bool has_own = !is_tile && direction == MOIRE_ROWWISE;
    const int64_t scale_row = has_own ? i : columnwise_row + (i - begin) / block;
    for (int64_t j = 0; j < out.columns; ++j) {
      const bool per_column = !is_tile && direction == MOIRE_COLUMNWISE;
      const double scale = read_element(scales, scale_row, per_column ? j : j / block);
      out.at(i, j).value = fp32(read_element(data, i, j) * scale);
    }
  }
}

Matrix decode(const moire_quantized& q, int32_t scaling, int32_t direction,
              const moire_groups& groups) {
  const TensorView data(q.data);
  const int64_t block = block_of(scaling);
  if (data.rank == 3) {
    Matrix out(data.num_rows(), data.columns());
    const int64_t n = data.shape[1];
    for (int64_t g = 0; g < data.shape[0]; ++g) {
      decode_rows(q, scaling, direction, g * n, (g + 1) * n, g * blocks_in(n, block), out);
    }
    return out;
  }
  Matrix out(rows_in_use(groups), data.columns());
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    decode_rows(q, scaling, direction, groups.offsets[g], groups.offsets[g + 1],
                groups.offsets[g] / block + g, out);
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
    return quantize_ragged(values, recipe, direction, groups);
  };
  QuantizeResults out{
      copy(args.rowwise, MOIRE_ROWWISE), copy(args.columnwise, MOIRE_COLUMNWISE), {}};
  if (is_present(args.grad_bias)) {
    const std::vector<double> ones(static_cast<size_t>(values.rows), 1);
    out.grad_bias =
        sum_rows(values, ones, args.grad_bias, {args.beta, args.beta_per_group}, groups);
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
    return quantize_matrices(values, recipe, direction, num_groups, n);
  };
  return {copy(args.rowwise, MOIRE_ROWWISE), copy(args.columnwise, MOIRE_COLUMNWISE), {}};
}

QuantizedBytes requantize(const moire_requantize_args& args) {
  const TensorView data(args.source.data);
  std::vector<int64_t> one;
  const moire_groups groups = resolve(args.groups, data.num_rows(), one);
  const Matrix values = decode(args.source, args.scaling, args.direction, groups);
  const Recipe recipe{TensorView(args.target.data).type(), args.scaling,
                      args.fractional_scales != 0};
  const int32_t direction = args.direction == MOIRE_ROWWISE ? MOIRE_COLUMNWISE : MOIRE_ROWWISE;
  if (data.rank == 2) return quantize_ragged(values, recipe, direction, groups);
  return quantize_matrices(values, recipe, direction, data.shape[0], data.shape[1]);
}

Matrix dequantize(const moire_dequantize_args& args) {
  std::vector<int64_t> one;
  const moire_groups groups = resolve(args.groups, TensorView(args.source.data).num_rows(), one);
  return decode(args.source, args.scaling, args.direction, groups);
}

}  // namespace moire::reference
