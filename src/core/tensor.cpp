#include <moire/status.h>
#include <moire/tensor.h>

#include "core/format.h"

namespace moire {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kOutOfMemory:
      return "out of memory";
    case Code::kDevice:
      return "device";
    case Code::kIo:
      return "io";
    case Code::kInternal:
      return "internal";
  }
  return "unknown code";
}

int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kNone:
      return 0;
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kE8M0:
    case DType::kUint8:
      return 1;
    case DType::kBF16:
    case DType::kFP16:
      return 2;
    case DType::kFP32:
    case DType::kInt32:
      return 4;
    case DType::kInt64:
    case DType::kFP64:
      return 8;
  }
  return 0;
}

std::string dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kNone:
      return "none";
    case DType::kFP32:
      return "fp32";
    case DType::kBF16:
      return "bf16";
    case DType::kFP16:
      return "fp16";
    case DType::kE4M3:
      return "e4m3";
    case DType::kE5M2:
      return "e5m2";
    case DType::kE8M0:
      return "e8m0";
    case DType::kUint8:
      return "uint8";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kFP64:
      return "fp64";
  }
  return concat("dtype ", static_cast<int32_t>(dtype));
}

std::string to_string(const TensorView& tensor) {
  if (!tensor.is_present()) return "absent";
  if (tensor.rank < 0 || tensor.rank > 3) {
    return concat(dtype_name(tensor.type()), " of rank ", tensor.rank);
  }
  std::string out = dtype_name(tensor.type()) + " [";
  for (int32_t i = 0; i < tensor.rank; ++i) {
    out += concat(i == 0 ? "" : ", ", tensor.shape[i]);
  }
  out += "]";
  if (!tensor.is_contiguous()) out += concat(" with row stride ", tensor.stride());
  return out;
}

TensorView Weight::matrix(int64_t group) const {
  TensorView m = tensor;
  m.rank = 2;
  m.shape[0] = tensor.shape[1];
  m.shape[1] = tensor.shape[2];
  m.shape[2] = 0;
  if (list != nullptr) {
    m.data = const_cast<void*>(list[group]);
  } else {
    const int64_t bytes = group * m.shape[0] * m.stride() * dtype_size(m.type());
    m.data = static_cast<char*>(tensor.data) + bytes;
  }
  return m;
}

}  // namespace moire
