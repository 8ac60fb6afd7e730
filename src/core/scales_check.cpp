#include "core/scales_check.h"

#include "core/name.h"
#include "core/scale_shapes.h"

namespace moire {
namespace {

enum class Kind { kPlain, kBlocks, kRaggedBlocks };

// A shape, and what messages call its sizes.
struct Shape {
  std::string_view of[3];
  Kind kinds[3] = {};
  int64_t sizes[3] = {};
  int64_t block = 0;
  int32_t rank = 0;

  // Of what is called `name`, or of its blocks.
  void add(std::string_view name, Kind kind, int64_t size) {
    of[rank] = name;
    kinds[rank] = kind;
    sizes[rank++] = size;
  }
  std::string name(int32_t i) const {
    switch (kinds[i]) {
      case Kind::kPlain:
        break;
      case Kind::kBlocks:
        return concat("ceil(", of[i], " / ", block, ")");
      case Kind::kRaggedBlocks:
        return concat(of[i], " / ", block, " + G");
    }
    return std::string(of[i]);
  }
  bool equals(const TensorView& t) const {
    bool equal = t.rank == rank;
    for (int32_t i = 0; equal && i < rank; ++i) equal = t.shape[i] == sizes[i];
    return equal;
  }
};

std::string_view direction_name(int32_t direction) {
  return direction == MOIRE_ROWWISE ? "rowwise" : "columnwise";
}

Shape ragged_shape(const TensorView& scales, int32_t direction, NamedSize rows, NamedSize columns,
                   const Groups& groups) {
  const int32_t scaling = ragged_scaling(scales.type());
  const bool is_rowwise = direction == MOIRE_ROWWISE;
  const ScaleShape sizes =
      ragged_scales(scaling, direction, rows.size, groups.num_groups, columns.size);
  Shape s;
  s.block = scale_block(scaling);
  s.add(rows.name, is_rowwise ? Kind::kPlain : Kind::kRaggedBlocks, sizes.rows);
  s.add(columns.name, is_rowwise ? Kind::kBlocks : Kind::kPlain, sizes.columns);
  return s;
}

Shape weight_shape(const Weight& w, int32_t scaling, int32_t direction) {
  const bool out_in = w.layout == MOIRE_OUT_IN;
  const bool tiles = scaling == MOIRE_SCALING_FP8_TILE;
  const bool cuts_rows = tiles || direction == MOIRE_COLUMNWISE;
  const bool cuts_columns = tiles || direction == MOIRE_ROWWISE;
  const ScaleShape sizes = matrix_scales(scaling, direction, w.tensor.shape[1], w.tensor.shape[2]);
  Shape s;
  s.block = scale_block(scaling);
  s.add("G", Kind::kPlain, w.tensor.shape[0]);
  s.add(out_in ? "out" : "in", cuts_rows ? Kind::kBlocks : Kind::kPlain, sizes.rows);
  s.add(out_in ? "in" : "out", cuts_columns ? Kind::kBlocks : Kind::kPlain, sizes.columns);
  return s;
}

// Scales of this dtype and shape; `other` is what they would be for the other direction.
bool check_shape(ArgumentCheck& check, const NamedTensor& scales, const Shape& wanted,
                 const Shape& other, int32_t direction) {
  const TensorView& t = scales.tensor;
  const bool fits = wanted.equals(t);
  std::string of_size[3];
  for (int32_t i = 0; !fits && i < wanted.rank; ++i) of_size[i] = wanted.name(i);
  if (!fits && other.equals(t)) {
    std::string names, sizes;
    for (int32_t i = 0; i < wanted.rank; ++i) {
      names += concat(i == 0 ? "" : ", ", of_size[i]);
      sizes += concat(i == 0 ? "" : ", ", wanted.sizes[i]);
    }
    return check.require(false, scales.name, " is ", t, ", which is the shape of ",
                         direction_name(1 - direction), " scales; this call needs ",
                         direction_name(direction), " ones, [", names, "] = [", sizes, "]");
  }
  const auto size = [&](int32_t i) { return NamedSize{of_size[i], wanted.sizes[i]}; };
  if (wanted.rank == 2) return check.tensor(scales.name, t, kScaleTypes, {size(0), size(1)});
  return check.tensor(scales.name, t, kScaleTypes, {size(0), size(1), size(2)});
}

// Whether there are scales to be looked at: exactly where the data is FP8, of a known type.
bool has_scales(ArgumentCheck& check, const ScaledTensor& t) {
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

// Scales that are there and of the type which `scaling` stores.
bool check_scale_dtype(ArgumentCheck& check, const NamedTensor& scales, int32_t scaling) {
  const DType needed = scale_dtype(scaling);
  check.require(scales.tensor.is_present(), scales.name, " is absent, needs ", needed);
  return check.require(scales.tensor.type() == needed, scales.name, " is ", scales.tensor,
                       ", needs ", needed, ": scaling is ", scaling_name(scaling));
}

bool check_copy(ArgumentCheck& check, std::string_view name, const moire_quantized& q,
                int32_t direction, const Groups& groups, NamedSize columns) {
  const TensorView data = q.data;
  if (!is_given(q)) return check.ok();
  const Name data_name(name, ".data"), scales_name(name, ".scales");
  check.tensor(data_name, data, kFp8Types, {{"capacity", groups.capacity}, columns});
  const ScaledTensor t{{data_name, data}, {scales_name, q.scales}};
  if (direction == MOIRE_ROWWISE) return check_rowwise_scales(check, t, groups, columns);
  return check_columnwise_scales(check, t, {}, groups, columns);
}

}  // namespace

bool check_rowwise_scales(ArgumentCheck& check, const ScaledTensor& t, const Groups& groups,
                          NamedSize columns) {
  if (!check.ok() || !has_scales(check, t)) return check.ok();
  const TensorView& data = t.data.tensor;
  const NamedSize rows{data.shape[0] == groups.capacity ? "capacity" : "T", data.shape[0]};
  const TensorView& scales = t.scales.tensor;
  return check_shape(check, t.scales, ragged_shape(scales, MOIRE_ROWWISE, rows, columns, groups),
                     ragged_shape(scales, MOIRE_COLUMNWISE, rows, columns, groups), MOIRE_ROWWISE);
}

bool check_columnwise_scales(ArgumentCheck& check, const ScaledTensor& t,
                             const NamedTensor& row_idx, const Groups& groups, NamedSize columns) {
  if (!check.ok() || !has_scales(check, t)) return check.ok();
  if (!check.require(!row_idx.tensor.is_present(), row_idx.name, " is present but ", t.data.name,
                     " is ", t.data.tensor,
                     ", whose columnwise scales are in the order of the groups: gather before "
                     "quantising")) {
    return false;
  }
  const NamedSize rows{"capacity", groups.capacity};
  const TensorView& scales = t.scales.tensor;
  return check_shape(check, t.scales, ragged_shape(scales, MOIRE_COLUMNWISE, rows, columns, groups),
                     ragged_shape(scales, MOIRE_ROWWISE, rows, columns, groups), MOIRE_COLUMNWISE);
}

bool check_weight_scales(ArgumentCheck& check, const Weight& w, const ScaledTensor& t,
                         int32_t direction) {
  if (!check.ok() || !has_scales(check, t)) return check.ok();
  if (!check.require(w.list == nullptr, t.data.name, " is a list of ", t.data.tensor.type(),
                     " matrices, needs packed weights: their scales are one tensor")) {
    return false;
  }
  const int32_t scaling = weight_scaling(t.scales.tensor.type());
  return check_shape(check, t.scales, weight_shape(w, scaling, direction),
                     weight_shape(w, scaling, 1 - direction), direction);
}

bool check_quantized(ArgumentCheck& check, std::string_view name, const moire_quantized& q,
                     int32_t scaling, int32_t direction, const Groups& groups, NamedSize columns) {
  const Name data_name(name, ".data"), scales_name(name, ".scales");
  check.tensor(data_name, q.data, kFp8Types, {{"capacity", groups.capacity}, columns});
  return check_scales(check, {scales_name, q.scales}, scaling, direction, groups, columns);
}

bool check_scales(ArgumentCheck& check, const NamedTensor& scales, int32_t scaling,
                  int32_t direction, const Groups& groups, NamedSize columns) {
  if (!check_scale_dtype(check, scales, scaling)) return false;
  const NamedSize rows{"capacity", groups.capacity};
  const TensorView& t = scales.tensor;
  return check_shape(check, scales, ragged_shape(t, direction, rows, columns, groups),
                     ragged_shape(t, 1 - direction, rows, columns, groups), direction);
}

bool check_quantized(ArgumentCheck& check, std::string_view name, const moire_quantized& q,
                     int32_t scaling, int32_t direction, const Weight& w) {
  const Name data_name(name, ".data"), scales_name(name, ".scales");
  const bool out_in = w.layout == MOIRE_OUT_IN;
  const int64_t* shape = w.tensor.shape;
  check.tensor(
      data_name, q.data, kFp8Types,
      {{"G", shape[0]}, {out_in ? "out" : "in", shape[1]}, {out_in ? "in" : "out", shape[2]}});
  const NamedTensor scales{scales_name, q.scales};
  if (!check_scale_dtype(check, scales, scaling)) return false;
  return check_shape(check, scales, weight_shape(w, scaling, direction),
                     weight_shape(w, scaling, 1 - direction), direction);
}

bool check_fractional(ArgumentCheck& check, int32_t scaling, int32_t fractional_scales) {
  check.enumerator("fractional_scales", fractional_scales, 2);
  return check.require(fractional_scales == 0 || scaling != MOIRE_SCALING_MXFP8,
                       "fractional_scales is 1, but the scales of MXFP8 are powers of two");
}

bool check_quantized_copies(ArgumentCheck& check, const QuantizedCopies& copies,
                            int32_t fractional_scales, const Groups& groups, NamedSize columns) {
  check_copy(check, copies.rowwise_name, copies.rowwise, MOIRE_ROWWISE, groups, columns);
  check_copy(check, copies.columnwise_name, copies.columnwise, MOIRE_COLUMNWISE, groups, columns);
  const TensorView r = copies.rowwise.scales, c = copies.columnwise.scales;
  const DType scales = r.type() == DType::kE8M0 ? r.type() : c.type();
  check_fractional(check, ragged_scaling(scales), fractional_scales);
  return check.require(!r.is_present() || !c.is_present() || r.dtype == c.dtype,
                       copies.rowwise_name, ".scales is ", r, " but ", copies.columnwise_name,
                       ".scales is ", c, ": both copies must be quantised alike");
}

}  // namespace moire
