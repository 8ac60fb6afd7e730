// GroupedTensor: its views and its memory.
#include <moire/grouped_tensor.h>

#include <algorithm>
#include <cstring>

#include "core/arena.h"
#include "core/format.h"
#include "core/resolved_groups.h"
#include "core/scale_shapes.h"
#include "core/sizes.h"
#include "core/status_macros.h"

namespace moire {
namespace {

// Rows [first, first + count) of a matrix.
TensorView rows_of(const TensorView& t, int64_t first, int64_t count) {
  TensorView rows = t;
  rows.data = static_cast<char*>(t.data) + first * t.stride() * dtype_size(t.type());
  rows.shape[0] = count;
  return rows;
}

// Matrix `index` of a batch [G, ., .], as a batch of one.
TensorView matrix_of(const TensorView& t, int64_t index) {
  TensorView matrix = t;
  matrix.data = static_cast<char*>(t.data) + index * t.shape[1] * t.stride() * dtype_size(t.type());
  matrix.shape[0] = 1;
  return matrix;
}

Quantized matrix_of(const Quantized& q, int64_t index) {
  if (!q.is_present()) return {};
  return {matrix_of(TensorView(q.data), index), matrix_of(TensorView(q.scales), index)};
}

Status check_options(std::string_view call, const GroupedTensorOptions& o) {
  if (o.scaling < MOIRE_SCALING_MXFP8 || o.scaling > MOIRE_SCALING_FP8_TILE) {
    return invalid(call, concat("scaling is ", o.scaling, ", must be 1 to 3"));
  }
  if (o.fractional_scales && o.scaling == MOIRE_SCALING_MXFP8) {
    return invalid(call, "fractional_scales is set, but the scales of MXFP8 are powers of two");
  }
  if (o.element != DType::kE4M3 && o.element != DType::kE5M2) {
    return invalid(call, concat("element is ", o.element, ", needs e4m3 or e5m2"));
  }
  if (!o.rowwise && !o.columnwise) {
    return invalid(call, "neither rowwise nor columnwise is asked for, needs at least one");
  }
  if (o.scaling == MOIRE_SCALING_FP8_TILE && (o.columnwise || !o.rowwise)) {
    return invalid(call,
                   "tiles serve both directions and are rowwise, but columnwise is asked for");
  }
  return {};
}

// One direction's memory: data of this shape, scales of `matrices` matrices.
Quantized take(Arena& arena, const GroupedTensorOptions& o, std::initializer_list<int64_t> shape,
               int64_t matrices, ScaleShape s) {
  const TensorView data(nullptr, o.element, shape);
  const DType dtype = scale_dtype(o.scaling);
  TensorView scales(nullptr, dtype, {s.rows, s.columns});
  if (shape.size() == 3) scales = TensorView(nullptr, dtype, {matrices, s.rows, s.columns});
  Quantized q(data, scales);
  q.data.data = arena.take(data.num_bytes());
  q.scales.data = arena.take(scales.num_bytes());
  return q;
}

// Memory for both directions, as far as they are asked for: `take_copy(arena, direction)` is called
// to size it and again to share it out.
template <class TakeCopy>
Status allocate(std::string_view call, const GroupedTensorOptions& o, Buffer& memory,
                GroupedTensorView& view, TakeCopy&& take_copy) {
  const auto carve = [&](Arena arena) {
    if (o.rowwise) view.rowwise = take_copy(arena, MOIRE_ROWWISE);
    if (o.columnwise) view.columnwise = take_copy(arena, MOIRE_COLUMNWISE);
    return arena.used();
  };
  view.scaling = o.scaling;
  view.fractional_scales = o.fractional_scales;
  memory = Buffer(carve(Arena()));
  if (!memory.ok()) return {Code::kOutOfMemory, concat(call, ": no memory")};
  carve(Arena(memory.workspace()));
  return {};
}

// Elements and scales of both directions take at most ten bytes an element.
bool fits_63_bits(std::initializer_list<int64_t> sizes) {
  int64_t bytes = 16;
  for (const int64_t size : sizes) bytes = product(bytes, std::max<int64_t>(size, 1));
  return bytes < kTooLarge;
}

}  // namespace

bool GroupedTensorView::all_same_shape() const { return !is_ragged() || groups.offsets == nullptr; }

int64_t GroupedTensorView::nbytes() const {
  int64_t bytes = 0;
  for (const moire_quantized& q : {rowwise, columnwise}) {
    bytes += TensorView(q.data).num_bytes() + TensorView(q.scales).num_bytes();
  }
  return bytes;
}

GroupedTensorView GroupedTensorView::matrix(int64_t group) const {
  GroupedTensorView one = *this;
  one.groups = Groups();
  if (!is_ragged()) {
    one.rowwise = matrix_of(rowwise, group);
    one.columnwise = matrix_of(columnwise, group);
    return one;
  }
  const bool is_whole = groups.offsets == nullptr;
  const int64_t first = is_whole ? 0 : groups.offsets[group];
  const int64_t rows = is_whole ? data().shape[0] : groups.offsets[group + 1] - first;
  const int64_t block = scale_block(scaling);
  if (has_rowwise()) {
    one.rowwise =
        Quantized(rows_of(rowwise.data, first, rows), rows_of(rowwise.scales, first, rows));
  }
  if (has_columnwise()) {
    // A group owns one row of scales more than it has whole blocks: see moire_quantized.
    one.columnwise = Quantized(rows_of(columnwise.data, first, rows),
                               rows_of(columnwise.scales, first / block + group, rows / block + 1));
  }
  return one;
}

Result<GroupedTensor> GroupedTensor::ragged(const Groups& groups, int64_t k,
                                            const GroupedTensorOptions& options) {
  constexpr std::string_view kCall = "GroupedTensor::ragged";
  MOIRE_RETURN_IF_ERROR(check_options(kCall, options));
  if (options.scaling == MOIRE_SCALING_FP8_TILE) {
    return invalid(kCall, "scaling is FP8_TILE (3), but tiles are of uniform batches");
  }
  if (groups.capacity < 0 || groups.num_groups < 0 || k < 0) {
    return invalid(kCall, concat("capacity ", groups.capacity, ", ", groups.num_groups,
                                 " groups, k ", k, ": sizes must not be negative"));
  }
  if (!fits_63_bits({sum(groups.capacity, groups.num_groups), k})) {
    return invalid(kCall,
                   concat("[", groups.capacity, ", ", k, "]: its size in bytes exceeds 63 bits"));
  }
  GroupedTensor t;
  t.view_.groups = present_groups(groups);
  MOIRE_RETURN_IF_ERROR(
      allocate(kCall, options, t.memory_, t.view_, [&](Arena& arena, int32_t direction) {
        return take(
            arena, options, {groups.capacity, k}, 1,
            ragged_scales(options.scaling, direction, groups.capacity, groups.num_groups, k));
      }));
  return t;
}

Result<GroupedTensor> GroupedTensor::uniform(int64_t num_groups, int64_t n, int64_t k,
                                             const GroupedTensorOptions& options) {
  constexpr std::string_view kCall = "GroupedTensor::uniform";
  MOIRE_RETURN_IF_ERROR(check_options(kCall, options));
  if (num_groups < 0 || n < 0 || k < 0) {
    return invalid(kCall,
                   concat("[", num_groups, ", ", n, ", ", k, "]: sizes must not be negative"));
  }
  if (!fits_63_bits({num_groups, n, k})) {
    return invalid(
        kCall, concat("[", num_groups, ", ", n, ", ", k, "]: its size in bytes exceeds 63 bits"));
  }
  GroupedTensor t;
  MOIRE_RETURN_IF_ERROR(
      allocate(kCall, options, t.memory_, t.view_, [&](Arena& arena, int32_t direction) {
        return take(arena, options, {num_groups, n, k}, num_groups,
                    matrix_scales(options.scaling, direction, n, k));
      }));
  return t;
}

Result<GroupedTensor> GroupedTensor::clone() const {
  GroupedTensor copy;
  copy.view_ = view_;
  copy.memory_ = Buffer(memory_.bytes());
  if (!copy.memory_.ok()) return Status(Code::kOutOfMemory, "GroupedTensor::clone: no memory");
  if (memory_.bytes() != 0) {
    std::memcpy(copy.memory_.data(), memory_.data(), memory_.bytes());
  }
  const auto moved = [&](moire_tensor& t) {
    if (t.data == nullptr) return;
    t.data = static_cast<char*>(copy.memory_.data()) +
             (static_cast<char*>(t.data) - static_cast<char*>(memory_.data()));
  };
  for (Quantized* q : {&copy.view_.rowwise, &copy.view_.columnwise}) {
    moved(q->data);
    moved(q->scales);
  }
  return copy;
}

}  // namespace moire
