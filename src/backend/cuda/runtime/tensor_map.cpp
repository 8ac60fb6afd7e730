#include "backend/cuda/runtime/tensor_map.h"

#include <algorithm>

namespace moire::cuda {

CUtensorMap TensorMaps::encode(std::string_view name, const TensorView& t,
                               std::initializer_list<Dimension> dimensions) {
  CUtensorMap map{};
  if (!launcher_.ok()) return map;
  constexpr size_t kMaxRank = 5;
  cuuint64_t sizes[kMaxRank], strides[kMaxRank];
  cuuint32_t box[kMaxRank], steps[kMaxRank];
  cuuint32_t rank = 0;
  for (const Dimension& dimension : dimensions) {
    sizes[rank] = static_cast<cuuint64_t>(dimension.size);
    if (rank > 0) strides[rank - 1] = static_cast<cuuint64_t>(dimension.stride_bytes);
    box[rank] = static_cast<cuuint32_t>(dimension.box);
    steps[rank++] = 1;
  }
  const DType dtype = t.type();
  const CUtensorMapDataType type = dtype == DType::kFP32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const int64_t inner_bytes = box[0] * dtype_size(dtype);
  const CUtensorMapSwizzle swizzle = inner_bytes == 64    ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : inner_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                                          : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUresult result = launcher_.state().encode_tensor_map(
      &map, type, rank, t.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    launcher_.fail({Code::kDevice, concat(launcher_.op(), ": cuTensorMapEncodeTiled of ", name,
                                          " failed with error ", static_cast<int>(result))});
  }
  return map;
}

namespace {

int64_t columns_of_box(const TensorView& t, int64_t given = 0) {
  return given == 0 ? 128 / dtype_size(t.type()) : given;
}
int64_t row_bytes(const TensorView& t) { return t.stride() * dtype_size(t.type()); }

}  // namespace

Matrices::Matrices(const TensorView& packed)
    : tensor(packed), count(packed.shape[0]), distance(packed.shape[1] * row_bytes(packed)) {}

Matrices::Matrices(const Weight& w) : Matrices(TensorView(w.tensor)) {
  if (w.list == nullptr) return;
  constexpr uintptr_t kMostApart = uintptr_t{1} << 34;  // a stride has 40 bits
  const auto address = [&](int64_t g) { return reinterpret_cast<uintptr_t>(w.list[g]); };
  uintptr_t first = address(0), last = first, distances = kMostApart;
  for (int64_t g = 1; g < w.tensor.shape[0]; ++g) {
    first = std::min(first, address(g));
    last = std::max(last, address(g));
    distances |= address(g) - address(0);
  }
  tensor.data = reinterpret_cast<void*>(first);
  count = kMost;
  distance = static_cast<int64_t>(distances & -distances);
  span = static_cast<int64_t>(last - first);
}

CUtensorMap TensorMaps::matrix(std::string_view name, const TensorView& t, int64_t box_rows,
                               int64_t box_columns) {
  return encode(
      name, t,
      {{t.columns(), 0, columns_of_box(t, box_columns)}, {t.shape[0], row_bytes(t), box_rows}});
}

CUtensorMap TensorMaps::matrices(std::string_view name, const Matrices& m, int64_t box_rows,
                                 int64_t box_columns) {
  const TensorView& t = m.tensor;
  return encode(name, t,
                {{t.columns(), 0, columns_of_box(t, box_columns)},
                 {t.shape[1], row_bytes(t), box_rows},
                 {m.count, m.distance, 1}});
}

CUtensorMap TensorMaps::panels(std::string_view name, const Matrices& m, int64_t box_rows,
                               int64_t num_panels) {
  const TensorView& t = m.tensor;
  const int64_t width = columns_of_box(t);
  return encode(name, t,
                {{width, 0, width},
                 {t.shape[1], row_bytes(t), box_rows},
                 {t.columns() / width, 128, num_panels},
                 {m.count, m.distance, 1}});
}

CUtensorMap TensorMaps::ragged_rows(std::string_view name, const TensorView& t, int64_t box_rows,
                                    int64_t halves, int64_t box_columns) {
  constexpr int64_t kRows = int64_t{1} << 30, kMany = int64_t{1} << 31, kWrap = int64_t{1} << 34;
  const int64_t columns = t.columns() / halves, row = row_bytes(t);
  const Dimension inner{columns, 0, columns_of_box(t, box_columns)}, rows{kRows, row, box_rows};
  const Dimension offset{kMany, row, 1}, wrap{kMany, kWrap - row, 1};
  if (halves == 1) return encode(name, t, {inner, rows, offset, wrap});
  const Dimension half{halves, columns * dtype_size(t.type()), 1};
  return encode(name, t, {inner, half, rows, offset, wrap});
}

}  // namespace moire::cuda
