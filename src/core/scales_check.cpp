#include "core/scales_check.h"

#include "core/name.h"
#include "core/scale_shapes.h"

namespace moire {
namespace {

std::string_view direction_name(int32_t direction) {
  return direction == MOIRE_ROWWISE ? "rowwise" : "columnwise";
}

ScaleShape scales_of(const ScaledShape& s, int32_t scaling, int32_t direction) {
  return s.is_weight ? matrix_scales(scaling, direction, s.rows.size, s.columns.size)
                     : ragged_scales(scaling, direction, s.rows.size, s.num_groups, s.columns.size);
}

bool fits(const TensorView& t, const ScaledShape& s, const ScaleShape& scales) {
  return t.rank == (s.is_weight ? 3 : 2) && t.dim(-2) == scales.rows &&
         t.dim(-1) == scales.columns && (!s.is_weight || t.shape[0] == s.num_groups);
}

// "[capacity, ceil(k / 32)] = [40, 2]"
std::string shape_text(const ScaledShape& s, int32_t scaling, int32_t direction) {
  const int64_t block = scale_block(scaling);
  const ScaleShape sizes = scales_of(s, scaling, direction);
  const bool is_tile = scaling == MOIRE_SCALING_FP8_TILE;
  const auto blocks = [&](const NamedSize& size, bool is_cut) {
    return is_cut ? concat("ceil(", size.name, " / ", block, ")") : std::string(size.name);
  };
  const std::string columns = blocks(s.columns, is_tile || direction == MOIRE_ROWWISE);
  const std::string rows = direction == MOIRE_COLUMNWISE && !s.is_weight
                               ? concat(s.rows.name, " / ", block, " + G")
                               : blocks(s.rows, is_tile || direction == MOIRE_COLUMNWISE);
  return concat(s.is_weight ? "[G, " : "[", rows, ", ", columns, "] = [",
                s.is_weight ? concat(s.num_groups, ", ") : "", sizes.rows, ", ", sizes.columns,
                "]");
}

// Scales that are there, of the shape for this direction; a message says where it is the other's.
bool check_shape(ArgumentCheck& check, const NamedTensor& scales, int32_t scaling,
                 int32_t direction, const ScaledShape& s) {
  if (!check.ok()) return false;
  const TensorView& t = scales.tensor;
  if (fits(t, s, scales_of(s, scaling, direction))) {
    constexpr DType kScaleTypes[] = {DType::kE8M0, DType::kFP32};
    return check.ranked(scales.name, t, kScaleTypes, t.rank);
  }
  const std::string needed = shape_text(s, scaling, direction);
  if (!fits(t, s, scales_of(s, scaling, 1 - direction))) {
    return check.require(false, scales.name, " is ", t, ", needs ", needed);
  }
  return check.require(false, scales.name, " is ", t, ", which is the shape of ",
                       direction_name(1 - direction), " scales; this call needs ",
                       direction_name(direction), " ones, ", needed);
}

// Whether there are scales to be looked at: exactly where the data is FP8, of a known type.
bool has_scales(ArgumentCheck& check, const ScaledTensor& t) {
  if (!check.ok()) return false;
  const TensorView &data = t.data.tensor, &scales = t.scales.tensor;
  if (!is_fp8(data)) {
    check.require(!scales.is_present(), t.scales.name, " is ", scales, " but ", t.data.name, " is ",
                  data, ", needs e4m3 or e5m2 beside scales");
    return false;
  }
  check.require(scales.is_present(), t.data.name, " is ", data, " but ", t.scales.name,
                " is absent, needs its e8m0 or fp32 scales");
  return check.require(scales.type() == DType::kE8M0 || scales.type() == DType::kFP32,
                       t.scales.name, " is ", scales, ", needs e8m0 or fp32");
}

// Scales of rows, turned over for FP8 tensor cores.
bool check_turned(ArgumentCheck& check, const NamedTensor& scales) {
  return check.require(scales.tensor.is_contiguous() && check.context().device() != Device::kCpu,
                       scales.name, " is ", scales.tensor,
                       ", which is turned over: needs contiguous rows, on a GPU");
}

bool check_copy(ArgumentCheck& check, std::string_view name, const moire_quantized& q,
                int32_t direction, const Groups& groups, NamedSize columns) {
  if (!is_given(q)) return check.ok();
  if (is_values(q) || (direction == MOIRE_COLUMNWISE && is_transposed(q.data, q.scales, groups))) {
    return check_copy(check, name, q, scaling_of(q), direction, {groups, columns});
  }
  const Name data_name(name, ".data"), scales_name(name, ".scales");
  check.tensor(data_name, q.data, kFp8Types, {{"capacity", groups.capacity}, columns});
  return check_operand_scales(check, {{data_name, q.data}, {scales_name, q.scales}}, direction,
                              groups, columns);
}

}  // namespace

bool check_operand_scales(ArgumentCheck& check, const ScaledTensor& t, int32_t direction,
                          const Groups& groups, NamedSize columns) {
  if (!has_scales(check, t)) return check.ok();
  ScaledShape shape(groups, columns);
  if (direction == MOIRE_ROWWISE && has_turned_scales(t.data.tensor, t.scales.tensor, groups)) {
    return check_turned(check, t.scales);
  }
  const int64_t rows = t.data.tensor.shape[0];
  if (rows != groups.capacity) shape.rows = {"T", rows};  // of a gathered one
  return check_shape(check, t.scales, ragged_scaling(t.scales.tensor.type()), direction, shape);
}

bool check_transposed(ArgumentCheck& check, const ScaledTensor& t, const ScaledShape& shape) {
  const TensorView& data = t.data.tensor;
  const NamedSize rows{"128 * (capacity / 128 + G)",
                       transposed_rows(shape.rows.size, shape.num_groups)};
  check.tensor(t.data.name, data, kFp8Types, {shape.columns, rows});
  check.require(data.is_contiguous() && check.context().device() != Device::kCpu, t.data.name,
                " is ", data, ", which is transposed: needs contiguous rows, on a GPU");
  return check_scales(check, t.scales, MOIRE_SCALING_FP8_BLOCK, MOIRE_COLUMNWISE, shape);
}

bool check_weight_scales(ArgumentCheck& check, const Weight& w, const ScaledTensor& t,
                         int32_t direction) {
  if (!has_scales(check, t)) return check.ok();
  check.require(w.list == nullptr, t.data.name, " is a list of ", t.data.tensor.type(),
                " matrices, needs packed weights: their scales are one tensor");
  return check_shape(check, t.scales, weight_scaling(t.scales.tensor.type()), direction,
                     ScaledShape(w));
}

bool check_quantized(ArgumentCheck& check, std::string_view name, const moire_quantized& q,
                     int32_t scaling, int32_t direction, const ScaledShape& shape) {
  const Name data_name(name, ".data"), scales_name(name, ".scales");
  if (shape.is_weight) {
    check.tensor(data_name, q.data, kFp8Types,
                 {{"G", shape.num_groups}, shape.rows, shape.columns});
  } else {
    check.tensor(data_name, q.data, kFp8Types, {shape.rows, shape.columns});
  }
  return check_scales(check, {scales_name, q.scales}, scaling, direction, shape);
}

bool check_copy(ArgumentCheck& check, std::string_view name, const moire_quantized& q,
                int32_t scaling, int32_t direction, const ScaledShape& shape) {
  if (!is_given(q)) return check.ok();
  if (shape.is_weight) return check_quantized(check, name, q, scaling, direction, shape);
  const Name data_name(name, ".data"), scales_name(name, ".scales");
  const bool is_block = scaling == MOIRE_SCALING_FP8_BLOCK, is_rowwise = direction == MOIRE_ROWWISE;
  if (is_block && !is_rowwise && is_transposed(q.data, q.scales, shape.groups())) {
    return check_transposed(check, {{data_name, q.data}, {scales_name, q.scales}}, shape);
  }
  if (is_block && is_rowwise && has_turned_scales(q.data, q.scales, shape.groups())) {
    check.tensor(data_name, q.data, kFp8Types, {shape.rows, shape.columns});
    return check_turned(check, {scales_name, q.scales});
  }
  if (!is_values(q)) return check_quantized(check, name, q, scaling, direction, shape);
  check.tensor(data_name, q.data, kBF16Only, {shape.rows, shape.columns});
  const bool on_gpu = check.context().device() != Device::kCpu;
  return check.require(on_gpu && scaling == MOIRE_SCALING_MXFP8 && !is_present(q.scales), data_name,
                       " is bf16, needs e4m3 or e5m2: GPUs make values, in MXFP8, without scales");
}

bool check_scales(ArgumentCheck& check, const NamedTensor& scales, int32_t scaling,
                  int32_t direction, const ScaledShape& shape) {
  const DType needed = scale_dtype(scaling);
  check.require(scales.tensor.is_present(), scales.name, " is absent, needs ", needed);
  check.require(scales.tensor.type() == needed, scales.name, " is ", scales.tensor, ", needs ",
                needed, ": scaling is ", scaling_name(scaling));
  return check_shape(check, scales, scaling, direction, shape);
}

bool check_scaling(ArgumentCheck& check, int32_t scaling, bool takes_tiles, std::string_view but) {
  const int32_t last = takes_tiles ? MOIRE_SCALING_FP8_TILE : MOIRE_SCALING_FP8_BLOCK;
  return check.require(scaling >= MOIRE_SCALING_MXFP8 && scaling <= last, "scaling is ",
                       scaling_name(scaling), ", must be MXFP8 (1)",
                       takes_tiles ? ", FP8_BLOCK (2) or FP8_TILE (3)" : " or FP8_BLOCK (2)", but);
}

bool check_fractional(ArgumentCheck& check, int32_t scaling, int32_t fractional_scales,
                      bool may_fold) {
  if (fractional_scales == kFoldedScales) {
    return check.require(may_fold && check.context().device() != Device::kCpu,
                         "fractional_scales is 2 (folded), needs a ragged copy, on a GPU");
  }
  return check.require(fractional_scales == 0 || scaling != MOIRE_SCALING_MXFP8,
                       "fractional_scales is 1, but the scales of MXFP8 are powers of two");
}

bool check_quantized_copies(ArgumentCheck& check, std::string_view name, const moire_quantized& r,
                            const moire_quantized& c, int32_t fractional_scales,
                            const Groups& groups, NamedSize columns) {
  check_copy(check, Name(name, "_rowwise"), r, MOIRE_ROWWISE, groups, columns);
  check_copy(check, Name(name, "_columnwise"), c, MOIRE_COLUMNWISE, groups, columns);
  check_fractional(check, scaling_of(is_present(r) ? r : c), fractional_scales, true);
  const bool is_beside_folded = fractional_scales == kFoldedScales && !is_values(c) &&
                                scaling_of(r) == MOIRE_SCALING_FP8_BLOCK;
  return check.require(
      !is_present(r) || !is_present(c) || scaling_of(r) == scaling_of(c) || is_beside_folded, name,
      "_rowwise.scales is ", TensorView(r.scales), " but ", name, "_columnwise.scales is ",
      TensorView(c.scales), ": both copies must be quantised alike");
}

}  // namespace moire
