// GroupedTensor and QuantizedWeight: their views, their memory, and their operations as calls of
// ops.
#include <moire/grouped_tensor.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/argument_check.h"
#include "core/glu_layout.h"
#include "core/prepared_weight.h"
#include "core/resolved_groups.h"
#include "core/scale_shapes.h"
#include "core/status_macros.h"

namespace moire {
namespace {

// Entries [first, first + count) of the first dimension.
struct Slice {
  int64_t first, count;
};

Quantized slice_of(const Quantized& q, const Slice& data, const Slice& scales) {
  if (!q.is_present()) return {};
  return {TensorView(q.data).slice(data.first, data.count),
          TensorView(q.scales).slice(scales.first, scales.count)};
}

void check_options(ArgumentCheck& check, const GroupedTensorOptions& o) {
  const bool is_tiled = o.scaling == MOIRE_SCALING_FP8_TILE;
  check.require(o.scaling >= MOIRE_SCALING_MXFP8 && o.scaling <= MOIRE_SCALING_FP8_TILE,
                "scaling is ", o.scaling, ", must be 1 to 3");
  check.require(!o.fractional_scales || o.scaling != MOIRE_SCALING_MXFP8,
                "fractional_scales is set, but the scales of MXFP8 are powers of two");
  check.require(o.element == DType::kE4M3 || o.element == DType::kE5M2, "element is ", o.element,
                ", needs e4m3 or e5m2");
  check.require(o.rowwise || o.columnwise,
                "neither rowwise nor columnwise is asked for, needs at least one");
  check.require(!is_tiled || (o.rowwise && !o.columnwise),
                "tiles serve both directions and are rowwise, but columnwise is asked for");
}

// Whether `t` has the shape of the batch.
bool has_shape_of(const TensorView& t, const GroupedTensorView& v) {
  const TensorView data = v.data();
  return t.rank == data.rank && std::equal(t.shape, t.shape + 3, data.shape);
}

// Whether two copies have the same groups; values are looked at where the host can.
bool same_groups(const Context& context, const Groups& a, const Groups& b) {
  if (a.num_groups != b.num_groups || a.capacity != b.capacity) return false;
  if (a.offsets == b.offsets || context.device() != Device::kCpu || context.is_explaining()) {
    return true;
  }
  if (a.offsets == nullptr || b.offsets == nullptr) return false;
  return std::equal(a.offsets, a.offsets + a.num_groups + 1, b.offsets);
}

template <class A>
A quantize_args(const auto& source, const GroupedTensorView& target) {
  A args;
  args.source = source;
  args.scaling = target.scaling;
  args.fractional_scales = target.fractional_scales ? 1 : 0;
  args.rowwise = target.rowwise;
  args.columnwise = target.columnwise;
  return args;
}

// The rowwise copy, if there is one.
template <class A>
A args_of_source(const GroupedTensorView& source) {
  A args;
  args.source = source.has_rowwise() ? source.rowwise : source.columnwise;
  args.scaling = source.scaling;
  args.direction = source.has_rowwise() ? MOIRE_ROWWISE : MOIRE_COLUMNWISE;
  args.groups = source.groups;
  return args;
}

// A layout of 2F rows of elements, as that of scales, each of `rows` of them.
Result<moire_glu_layout> layout_of(const GluLayout& layout, int64_t two_f, int64_t rows) {
  if (rows == 1) return layout;
  const int64_t block = resolve_glu_layout(layout, two_f / 2).block;
  if (block % rows == 0) return moire_glu_layout{block / rows, layout.order};
  return invalid(
      "convert_glu", "gate and up lie in blocks of ", block, " rows, needs a multiple of ", rows,
      ": scales of columnwise copies and tiles are of ", rows, " rows, and nothing is requantised");
}

// Memory for the copies that `o` asks for, of data of this shape in the view's groups.
Status allocate(std::string_view call, const TensorView& shape, const GroupedTensorOptions& o,
                Buffer& memory, GroupedTensorView& view) {
  ArgumentCheck check(call);
  check_options(check, o);
  check.require(*std::min_element(shape.shape, shape.shape + 3) >= 0, shape,
                ": sizes must not be negative");
  if (!check.ok()) return check.status();
  view.scaling = o.scaling;
  view.fractional_scales = o.fractional_scales;
  const auto carve = [&](Arena arena) {
    const auto take = [&](int32_t direction) {
      return take_copy(arena, o.element, o.scaling, direction, shape, view.groups.num_groups);
    };
    if (o.rowwise) view.rowwise = take(MOIRE_ROWWISE);
    if (o.columnwise) view.columnwise = take(MOIRE_COLUMNWISE);
    return arena.used();
  };
  const size_t bytes = carve(Arena());
  if (!check.require(bytes < static_cast<size_t>(kTooLarge), shape,
                     ": its size in bytes exceeds 63 bits")) {
    return check.status();
  }
  memory = Buffer(bytes);
  if (!memory.ok()) return {Code::kOutOfMemory, concat(call, ": no memory")};
  carve(Arena(memory.workspace()));
  return {};
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
  Slice data_of_group{group, 1}, scales_down_columns{group, 1};
  if (is_ragged()) {
    const bool is_whole = groups.offsets == nullptr;
    const int64_t first = is_whole ? 0 : groups.offsets[group];
    const int64_t rows = is_whole ? data().shape[0] : groups.offsets[group + 1] - first;
    const int64_t block = scale_block(scaling);
    data_of_group = {first, rows};
    // A group owns one row of scales more than it has whole blocks: see moire_quantized.
    scales_down_columns = {first / block + group, rows / block + 1};
  }
  GroupedTensorView one = *this;
  one.groups = Groups();
  one.rowwise = slice_of(rowwise, data_of_group, data_of_group);
  one.columnwise = slice_of(columnwise, data_of_group, scales_down_columns);
  return one;
}

Result<GroupedTensor> GroupedTensor::ragged(const Groups& groups, int64_t k,
                                            const GroupedTensorOptions& options) {
  constexpr std::string_view kCall = "GroupedTensor::ragged";
  if (options.scaling == MOIRE_SCALING_FP8_TILE) {
    return invalid(kCall, "scaling is FP8_TILE (3), but tiles are of uniform batches");
  }
  if (groups.num_groups < 0) {
    return invalid(kCall, "groups.num_groups is ", groups.num_groups, ", must not be negative");
  }
  GroupedTensor t;
  t.view_.groups = present_groups(groups);
  MOIRE_RETURN_IF_ERROR(allocate(kCall, {nullptr, options.element, {groups.capacity, k}}, options,
                                 t.memory_, t.view_));
  return t;
}

Result<GroupedTensor> GroupedTensor::uniform(int64_t num_groups, int64_t n, int64_t k,
                                             const GroupedTensorOptions& options) {
  GroupedTensor t;
  MOIRE_RETURN_IF_ERROR(allocate("GroupedTensor::uniform",
                                 {nullptr, options.element, {num_groups, n, k}}, options, t.memory_,
                                 t.view_));
  return t;
}

Result<GroupedTensor> GroupedTensor::clone() const {
  GroupedTensor copy;
  copy.view_ = view_;
  copy.memory_ = Buffer(memory_.bytes());
  if (!copy.memory_.ok()) return Status(Code::kOutOfMemory, "GroupedTensor::clone: no memory");
  if (memory_.bytes() != 0) std::memcpy(copy.memory_.data(), memory_.data(), memory_.bytes());
  GroupedTensorView& v = copy.view_;
  for (moire_tensor* t :
       {&v.rowwise.data, &v.rowwise.scales, &v.columnwise.data, &v.columnwise.scales}) {
    if (t->data == nullptr) continue;
    const auto offset = static_cast<char*>(t->data) - static_cast<char*>(memory_.data());
    t->data = static_cast<char*>(copy.memory_.data()) + offset;
  }
  return copy;
}

Status quantize(const Context& context, const TensorView& source, const GroupedTensorView& target,
                const TensorView& row_idx) {
  if (!target.is_ragged()) {
    if (!row_idx.is_present()) return quantize(context, Weight(source), target);
    return invalid("quantize", "row_idx is present, but the target is uniform");
  }
  auto args = quantize_args<QuantizeArgs>(source, target);
  args.row_idx = row_idx;
  args.groups = target.groups;
  return quantize(context, args);
}

Status quantize(const Context& context, const Weight& source, const GroupedTensorView& target) {
  if (target.is_ragged() || !has_shape_of(source.tensor, target)) {
    return invalid("quantize", "source is ", source.tensor, ", needs the shape of the target, ",
                   target.data());
  }
  return quantize_weight(context, quantize_args<QuantizeWeightArgs>(source, target));
}

Status dequantize(const Context& context, const GroupedTensorView& source,
                  const TensorView& target) {
  auto args = args_of_source<DequantizeArgs>(source);
  args.target = target;
  return dequantize(context, args);
}

Status requantize(const Context& context, const GroupedTensorView& source,
                  const GroupedTensorView& target) {
  const bool is_rowwise = source.has_rowwise();
  if (source.scaling != target.scaling) {
    return invalid("requantize", "source is ", scaling_name(source.scaling), ", target ",
                   scaling_name(target.scaling), ", must be alike");
  }
  if (is_rowwise ? !target.has_columnwise() : !target.has_rowwise()) {
    return invalid("requantize",
                   is_rowwise ? "source is rowwise, but target has no columnwise copy to write"
                              : "source is columnwise, but target has no rowwise copy to write");
  }
  if (!same_groups(context, source.groups, target.groups)) {
    return invalid("requantize", "source and target have different groups, must have the same");
  }
  auto args = args_of_source<RequantizeArgs>(source);
  args.fractional_scales = target.fractional_scales ? 1 : 0;
  args.target = is_rowwise ? target.columnwise : target.rowwise;
  return requantize(context, args);
}

Status convert_glu(const Context& context, const GroupedTensorView& source,
                   const GroupedTensorView& target) {
  if (!source.has_layout || !target.has_layout) {
    return invalid("convert_glu", source.has_layout ? "target" : "source",
                   " has no layout, needs one on both sides");
  }
  if (source.is_ragged() || source.scaling != target.scaling ||
      source.has_rowwise() != target.has_rowwise() ||
      source.has_columnwise() != target.has_columnwise() || !has_shape_of(source.data(), target)) {
    return invalid("convert_glu", "source is ", source.data(), ", target ", target.data(),
                   ": needs [G, 2F, k] of equal shape, scaling and directions");
  }
  const int64_t block = scale_block(source.scaling);
  const bool is_tiled = source.scaling == MOIRE_SCALING_FP8_TILE;
  const struct {
    const moire_tensor &source, &target;
    int64_t rows;  // of elements, to one of this tensor's
  } parts[] = {{source.rowwise.data, target.rowwise.data, 1},
               {source.rowwise.scales, target.rowwise.scales, is_tiled ? block : 1},
               {source.columnwise.data, target.columnwise.data, 1},
               {source.columnwise.scales, target.columnwise.scales, block}};
  const auto convert = [&](const Context& c) -> Status {
    for (const auto& part : parts) {
      if (!is_present(part.source)) continue;
      const int64_t two_f = source.data().shape[1];
      const Result<moire_glu_layout> from = layout_of(source.layout, two_f, part.rows),
                                     to = layout_of(target.layout, two_f, part.rows);
      if (!from.ok()) return from.status();
      if (!to.ok()) return to.status();
      ConvertGluArgs args;
      args.source = part.source;
      args.target = part.target;
      args.dim = 1;
      args.from = from.value();
      args.to = to.value();
      MOIRE_RETURN_IF_ERROR(convert_glu(c, args));
    }
    return {};
  };
  MOIRE_RETURN_IF_ERROR(convert(context.explaining()));  // all is checked before anything runs
  return convert(context);
}

Result<QuantizedWeight> QuantizedWeight::create(int64_t num_groups, int64_t n, int64_t k,
                                                int32_t scaling, bool fractional_scales) {
  if (scaling == MOIRE_SCALING_FP8_BLOCK) {
    return invalid(
        "QuantizedWeight::create",
        "scaling is FP8_BLOCK (2), needs MXFP8 (1) or FP8_TILE (3), which products take");
  }
  GroupedTensorOptions options;
  options.scaling = scaling;
  options.fractional_scales = fractional_scales;
  options.columnwise = scaling != MOIRE_SCALING_FP8_TILE;
  Result<GroupedTensor> copies = GroupedTensor::uniform(num_groups, n, k, options);
  if (!copies.ok()) return copies.status();
  QuantizedWeight weight;
  weight.copies_ = std::move(copies).value();
  return weight;
}

Result<QuantizedWeight> QuantizedWeight::create(const Context& context,
                                                const PrepareWeightArgs& args) {
  QuantizedWeight weight;
  weight.args_ = args;
  moire_prepared_weight& prepared = weight.args_.prepared;
  MOIRE_RETURN_IF_ERROR(prepare_weight_form(context, args, &prepared));
  weight.memory_ = Buffer(context, static_cast<size_t>(prepared.memory.shape[0]));
  prepared.memory.data = weight.memory_.data();
  size_t bytes = 0;
  MOIRE_RETURN_IF_ERROR(prepare_weight_workspace(context, weight.args_, &bytes));
  weight.workspace_ = Buffer(context, bytes);
  weight.args_.workspace = weight.workspace_.workspace();
  if (weight.memory_.ok() && weight.workspace_.ok()) return weight;
  return Status(Code::kOutOfMemory,
                concat("QuantizedWeight::create: no memory on ", device_name(context.device())));
}

Status QuantizedWeight::update(const Context& context, const Weight& weight, uint64_t version) {
  const bool is_prepared = is_present(args_.prepared);
  const bool is_alike = is_prepared || has_shape_of(weight.tensor, copies_.view());
  if (is_filled_ && version == version_ && is_alike) return {};
  is_filled_ = false;
  args_.w = weight;
  MOIRE_RETURN_IF_ERROR(is_prepared ? prepare_weight(context, args_)
                                    : quantize(context, weight, copies_.view()));
  version_ = version;
  is_filled_ = !context.is_explaining();
  return {};
}

}  // namespace moire
