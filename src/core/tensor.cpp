#include <moire/status.h>
#include <moire/tensor.h>

#include "core/argument_check.h"
#include "core/format.h"

namespace moire {

namespace {

constexpr std::pair<Code, std::string_view> kCodes[] = {
    {Code::kOk, "ok"},
    {Code::kInvalidArgument, "invalid argument"},
    {Code::kUnsupported, "unsupported"},
    {Code::kOutOfMemory, "out of memory"},
    {Code::kDevice, "device"},
    {Code::kIo, "io"},
    {Code::kInternal, "internal"},
    {Code::kRankFailed, "rank failed"}};

constexpr struct {
  DType dtype;
  std::string_view name;
  int64_t size;
} kDTypes[] = {
    {DType::kFP32, "fp32", 4},   {DType::kBF16, "bf16", 2},   {DType::kFP16, "fp16", 2},
    {DType::kE4M3, "e4m3", 1},   {DType::kE5M2, "e5m2", 1},   {DType::kE8M0, "e8m0", 1},
    {DType::kInt32, "int32", 4}, {DType::kInt64, "int64", 8}, {DType::kUint8, "uint8", 1},
    {DType::kFP64, "fp64", 8},   {DType::kNone, "none", 0}};

}  // namespace

std::string_view code_name(Code code) {
  for (const auto& [known, name] : kCodes) {
    if (known == code) return name;
  }
  return "unknown code";
}

int64_t dtype_size(DType dtype) {
  for (const auto& known : kDTypes) {
    if (known.dtype == dtype) return known.size;
  }
  return 0;
}

std::string dtype_name(DType dtype) {
  for (const auto& known : kDTypes) {
    if (known.dtype == dtype) return std::string(known.name);
  }
  return concat("dtype ", static_cast<int32_t>(dtype));
}

std::string shape_text(const TensorView& tensor) {
  std::string out = "[";
  for (int32_t i = 0; i < tensor.rank; ++i) out += concat(i == 0 ? "" : ", ", tensor.shape[i]);
  return out + "]";
}

std::string to_string(const TensorView& tensor) {
  if (!tensor.is_present()) return "absent";
  if (tensor.rank < 0 || tensor.rank > 3) {
    return concat(dtype_name(tensor.type()), " of rank ", tensor.rank);
  }
  std::string out = concat(dtype_name(tensor.type()), " ", shape_text(tensor));
  if (!tensor.is_contiguous()) out += concat(" with row stride ", tensor.stride());
  return out;
}

TensorView TensorView::slice(int64_t first, int64_t count) const {
  const int64_t elements = rank == 1 ? 1 : rank == 2 ? stride() : shape[1] * stride();  // of one
  TensorView part = *this;
  part.data = static_cast<char*>(data) + first * elements * dtype_size(type());
  part.shape[0] = count;
  return part;
}

TensorView Weight::matrix(int64_t group) const {
  const TensorView t = tensor;
  void* const data = list != nullptr ? const_cast<void*>(list[group]) : t.slice(group, 1).data;
  return TensorView(data, t.type(), {t.shape[1], t.shape[2]}, t.row_stride);
}

}  // namespace moire
