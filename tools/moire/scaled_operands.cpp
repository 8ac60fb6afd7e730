// The FP8 operands of Operands: codes of normal numbers, with scales that differ from block to
// block.
#include <cmath>

#include "operands.h"
#include "random.h"
#include "reference/fp8.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int64_t kCodes = 65521;  // after which they repeat: a prime

// What normal numbers are multiplied by, so that few saturate.
double reach(DType element) { return element == DType::kE4M3 ? 0x1p6 : 0x1p13; }

const std::vector<uint8_t>& normal_codes(DType element) {
  const auto make = [](DType type) {
    std::vector<uint8_t> codes(static_cast<size_t>(kCodes));
    Random random(1);
    for (uint8_t& code : codes) code = reference::encode_fp8(type, random.normal() * reach(type));
    return codes;
  };
  static const std::vector<uint8_t> e4m3 = make(DType::kE4M3), e5m2 = make(DType::kE5M2);
  return element == DType::kE4M3 ? e4m3 : e5m2;
}

int64_t blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }

}  // namespace

void Operands::fill_codes(const TensorView& t, const std::string& name) const {
  if (!is_filled()) return;
  const std::vector<uint8_t>& codes = normal_codes(t.type());
  auto place = static_cast<size_t>(Random(problem_.seed ^ hash(name)).below(kCodes));
  auto* const data = static_cast<uint8_t*>(t.data);
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    data[i] = codes[place];
    place = place + 1 == codes.size() ? 0 : place + 1;
  }
}

void Operands::fill_scales(const TensorView& t, const std::string& name, double scale,
                           int64_t first, int64_t count) const {
  if (!is_filled()) return;
  Random random(problem_.seed ^ hash(name) ^ static_cast<uint64_t>(first));
  const int middle = std::ilogb(scale);
  for (int64_t i = first * t.columns(); i < (first + count) * t.columns(); ++i) {
    const int exponent = middle + static_cast<int>(random.below(3)) - 1;
    if (t.type() == DType::kE8M0) {
      static_cast<uint8_t*>(t.data)[i] = static_cast<uint8_t>(127 + exponent);
    } else {
      const double fraction = problem_.fractional ? random.uniform() : 0;
      static_cast<float*>(t.data)[i] = static_cast<float>(std::ldexp(1 + fraction, exponent));
    }
  }
}

Operands::Scaled Operands::ragged_operand(const std::string& name, Kind kind, Format format,
                                          int64_t columns, int32_t direction, bool gathers) {
  const Problem& p = problem_;
  const bool is_gathered = gathers && p.gather;
  if (format.quantization == Quantization::kNone) {
    if (is_gathered) return {gathered(name, format.dtype, columns), row_idx(), {}};
    return {ragged(name, format.dtype, columns), {}, {}};
  }
  const DType element = kind == Kind::kGradient ? p.element : DType::kE4M3;
  const bool mx = format.quantization == Quantization::kMxfp8;
  const DType scale_type = mx ? DType::kE8M0 : DType::kFP32;
  const int64_t block = mx ? 32 : 128;
  const double scale = 1 / reach(element);
  const bool by_token = is_gathered && direction == MOIRE_ROWWISE;
  const int64_t rows = by_token ? p.tokens() : p.capacity();
  Scaled out;
  out.data = take(name, element, {rows, columns});
  fill_codes(out.data, name);
  if (!by_token) poison_tail(out.data);
  if (direction == MOIRE_ROWWISE) {
    out.scales = take(name + " scales", scale_type, {rows, blocks(columns, block)});
    fill_scales(out.scales, name, scale, 0, rows);
    if (!by_token) poison_tail(out.scales);
    out.row_idx = by_token ? row_idx() : TensorView();
    return out;
  }
  out.scales = output(name + " scales", scale_type, {p.capacity() / block + p.groups, columns});
  for (int64_t g = 0; g < p.groups; ++g) {
    const int64_t first = groups_.offsets[g], end = groups_.offsets[g + 1];
    fill_scales(out.scales, name, scale, first / block + g, blocks(end - first, block));
  }
  return out;
}

moire_quantized Operands::quantized_output(const std::string& name, Kind kind, int64_t columns,
                                           int32_t direction) {
  const Problem& p = problem_;
  if (p.quantization == Quantization::kNone) return {};
  const bool mx = p.quantization == Quantization::kMxfp8;
  const int64_t block = mx ? 32 : 128;
  const bool rowwise = direction == MOIRE_ROWWISE;
  return {output(name + ".data", kind == Kind::kGradient ? p.element : DType::kE4M3,
                 {p.capacity(), columns}),
          output(name + ".scales", mx ? DType::kE8M0 : DType::kFP32,
                 {rowwise ? p.capacity() : p.capacity() / block + p.groups,
                  rowwise ? blocks(columns, block) : columns})};
}

Operands::ScaledWeight Operands::weight_operand(const std::string& name, int64_t out, int64_t in,
                                                bool over_in) {
  const Problem& p = problem_;
  const Format format = p.b_format();
  if (format.quantization == Quantization::kNone) return {weight(name, format.dtype, out, in), {}};
  const bool mx = format.quantization == Quantization::kMxfp8;
  const int64_t block = mx ? 32 : 128;
  const int64_t rows = p.in_out ? in : out, columns = p.in_out ? out : in;
  const bool k_is_last = over_in != p.in_out;
  ScaledWeight w;
  w.weight.layout = p.in_out ? MOIRE_IN_OUT : MOIRE_OUT_IN;
  w.weight.list = nullptr;
  w.weight.tensor = take(name, DType::kE4M3, {p.groups, rows, columns});
  fill_codes(w.weight.tensor, name);
  w.scales = take(name + " scales", mx ? DType::kE8M0 : DType::kFP32,
                  {p.groups, mx && k_is_last ? rows : blocks(rows, block),
                   mx && !k_is_last ? columns : blocks(columns, block)});
  fill_scales(w.scales, name, 1 / reach(DType::kE4M3) / std::sqrt(static_cast<double>(in)), 0,
              w.scales.num_rows());
  return w;
}

}  // namespace moire::tool
