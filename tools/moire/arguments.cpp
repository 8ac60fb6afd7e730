#include "arguments.h"

#include <moire/quantize.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "reference/scaled.h"
#include "text.h"

namespace moire::tool {
namespace {

using reference::block_of;
using reference::scale_dtype;
using Values = Operands::Values;

constexpr float kRouterScale = 2.5F;  // DeepSeek-V3's

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_index(std::string_view name) {
  return name.ends_with("_idx") || is_one_of(name, {"splits", "choices"});
}

std::string scales_name(const std::string& operand) { return operand + " scales"; }

int32_t scaling_of(const Format& format) {
  return format.is_mx() ? MOIRE_SCALING_MXFP8 : MOIRE_SCALING_FP8_BLOCK;
}

// FP8 blocks of weights are tiles.
int32_t weight_scaling_of(const Format& format) {
  return format.is_mx() ? MOIRE_SCALING_MXFP8 : MOIRE_SCALING_FP8_TILE;
}

int32_t direction_of(const Problem& p) {
  return p.directions == Directions::kColumnwise ? MOIRE_COLUMNWISE : MOIRE_ROWWISE;
}

int32_t accumulation_of(const Problem& p) {
  if (p.emulated) return MOIRE_ACCUMULATE_EMULATED;
  return p.recipe == MOIRE_RECIPE_MXFP8_FAST ? MOIRE_ACCUMULATE_FAST : MOIRE_ACCUMULATE_EXACT;
}

}  // namespace

// d of a weight gradient lies like its weight: [in, out] takes the operands the other way round.
std::string Arguments::name_of(std::string_view field) const {
  if (is_wgrad() && problem_.in_out && is_one_of(field, {"a", "b"})) {
    field = field == "a" ? "b" : "a";
  }
  if (is_tiles() && field == "source") return "w1";
  return std::string(call_->name_of(field));
}

int64_t Arguments::size(char letter) const {
  const Problem& p = problem_;
  if (is_wgrad() && p.in_out && (letter == 'M' || letter == 'N'))
    letter = letter == 'M' ? 'N' : 'M';
  const std::pair<char, int64_t> sizes[] = {
      {'C', p.capacity()}, {'S', is_gathered_ ? p.tokens() : p.capacity()},
      {'T', p.tokens()},   {'k', p.topk},
      {'O', p.groups + 1}, {'H', p.hidden},
      {'F', p.ffn},        {'N', p.columns_of_y()},
      {'Z', p.fc1_width()}};
  const char meant = call_->name_of({&letter, 1})[0];
  for (const auto& [key, known] : sizes) {
    if (key == meant) return known;
  }
  return p.groups;  // groups, experts, splits
}

Operands::Shape Arguments::shape_of(std::string_view sizes, bool is_output) const {
  if (sizes == "??") {  // convert_scales, to a layout and back
    int64_t shape[2] = {};
    const bool is_there = is_output && !is_way_back();
    const int32_t layout = is_there ? problem_.scale_layout : MOIRE_SCALES_CANONICAL;
    static_cast<void>(moire::scales_shape(MOIRE_SCALING_MXFP8, direction_of(problem_), layout,
                                          problem_.capacity(), problem_.hidden, problem_.groups,
                                          shape));
    return {shape[0], shape[1]};
  }
  if (sizes == "ZK") sizes = "GZH";  // convert_glu
  if (is_tiles()) sizes = "GNK";
  Shape shape;
  for (const char letter : sizes) shape.push_back(size(letter));
  const bool swaps = shape.size() == 3 && problem_.in_out && !is_wgrad() && !is_tiles();
  if (swaps) std::swap(shape[1], shape[2]);
  return shape;
}

// Of a tensor that is not FP8.
DType Arguments::dtype_of(std::string_view name, std::string_view sizes) const {
  const Problem& p = problem_;
  if (sizes == "??") return DType::kE8M0;
  if (is_index(name)) return p.seed % 2 == 0 ? DType::kInt32 : DType::kInt64;
  if (name == "offsets") return DType::kInt64;
  // A number for each row, choice or expert.
  if (is_one_of(sizes, {"C", "Tk", "E"})) return DType::kFP32;
  if (name.starts_with("grad_b") || name.starts_with("grad_w")) {
    return p.out == DType::kNone ? DType::kFP32 : p.out;
  }
  const bool is_result = is_one_of(name, {"d", "decoded"}) || (name == "y" && !p.op->is_layer());
  if (is_result && p.out != DType::kNone) return p.out;
  if (is_product() && sizes[0] == 'S') return ragged_format(name).dtype;
  const bool is_between = is_one_of(name, {"z", "act", "grad_z", "grad_act"});
  return is_between ? p.dtype : stored();
}

// Of a product's ragged operand.
const Format& Arguments::ragged_format(std::string_view name) const {
  const bool is_b = is_wgrad() && !name.starts_with("grad_");
  return is_b ? problem_.b_format() : problem_;
}

DType Arguments::element_of(std::string_view name) const {
  return problem_.op->multiplies() && !name.starts_with("grad_") ? DType::kE4M3 : problem_.element;
}

bool Arguments::is_tiles() const {
  return call_->entry == "dequantize" && problem_.scaling == MOIRE_SCALING_FP8_TILE;
}

bool Arguments::wants(std::string_view field, std::string_view name, Role role) const {
  const Problem& p = problem_;
  if (field.ends_with("_prepared")) return false;  // what stands for weights that are there
  if (call_->entry == "bias_backward") return field != "scale" || p.probs;
  if (call_->entry == "quantize" && field == "grad_bias") return name != field;  // not of x
  if (is_one_of(name, {"bias", "bias_scale"})) return false;
  if (name.ends_with("b2_scale")) return p.bias && p.b2_scale == B2Scale::kOwn;
  if (name.starts_with("b") || name.starts_with("grad_b") || name == "expert_bias") return p.bias;
  if (is_one_of(field, {"scale", "bias_scale", "grad_scale"})) return p.bias && p.probs;
  if (is_one_of(name, {"probs", "grad_probs"})) return p.probs;
  if (name == "topk_weights") return p.probs || call_->entry == "router";
  if (name == "scatter_idx") return p.probs || call_->entry != "permute";
  if (!p.op->is_layer() || !is_one_of(name, {"z", "act", "grad_z"})) return true;
  if (!is_written(role)) return tensors_.contains(std::string(name));
  // The reference has to see what lies between a layer's products: see reference/recipe.h.
  if (operands_.is_judged() && p.is_quantized()) return true;
  const bool keeps = p.op->calls.size() > 1 && call_ == &p.op->calls[0];
  return keeps && (name == "z" || (name == "act" && p.save_act));
}

// Of copies that are written.
bool Arguments::wants_copy(std::string_view name, Role role) const {
  const Problem& p = problem_;
  if (p.op->is_layer()) {
    if (!p.is_quantized() || p.op->calls.size() == 1) return false;
    return (name == "x_columnwise" && p.x_columnwise) ||
           (name == "act_columnwise" && p.act_columnwise);
  }
  if (is_product()) return p.is_quantized();
  if (!is_written(role) || name == "target") return true;
  const bool is_rowwise = name == "rowwise";
  if (call_->entry == "quantize_weight" && p.scaling == MOIRE_SCALING_FP8_TILE) return is_rowwise;
  return p.directions == Directions::kBoth || (p.directions == Directions::kRowwise) == is_rowwise;
}

void Arguments::field(const char* field, moire_tensor& t, Role role, const char* sizes) {
  if (sets_values_) return;
  const std::string name = name_of(field);
  if (name.ends_with("row_idx")) {
    if (!is_gathered_) return;
    return this->field("gather_idx", t, Role::kIn, "C");
  }
  if (name.ends_with("_scales")) {
    const std::string operand = name_of(name.substr(0, name.rfind('_')));
    return static_cast<void>(t = tensors_[scales_name(operand)]);
  }
  if (call_->entry == "convert_glu") return static_cast<void>(t = convert(name, role));
  if (!wants(field, name, role)) return;
  Format format;
  if (sizes[0] == 'S') {
    if (is_product()) format = ragged_format(name);
    const bool is_columnwise = is_wgrad() && format.is_quantized();  // in expert order
    is_gathered_ = problem_.gather && is_one_of(name, {"x", "grad_y"}) && !is_columnwise;
  }
  const auto made = tensors_.find(name);
  if (!is_written(role) && made != tensors_.end()) return static_cast<void>(t = made->second);
  const Shape shape = shape_of(sizes, is_written(role));
  if (format.is_quantized()) {
    const int32_t scaling = scaling_of(format);
    const int64_t block_rows = is_gathered_ ? 0 : is_wgrad() ? block_of(scaling) : 1;
    t = codes(name, shape, scaling, is_wgrad() ? MOIRE_COLUMNWISE : MOIRE_ROWWISE, 1, block_rows);
    if (!is_gathered_) operands_.poison_tail(t);
  } else {
    t = operands_.take(name, dtype_of(name, sizes), shape);
    role == Role::kOut ? operands_.poison(t) : fill_input(t, name, sizes);
  }
  tensors_[name] = t;
}

// Of an accumulating output as well.
void Arguments::fill_input(const TensorView& t, const std::string& name, const char* sizes) {
  const Problem& p = problem_;
  const bool is_bias = name.starts_with("b");
  if (is_index(name)) {
    std::vector<int64_t> values = name == "splits"        ? operands_.splits()
                                  : name == "topk_idx"    ? operands_.expert_of_choice()
                                  : name == "scatter_idx" ? operands_.row_of_choice()
                                                          : operands_.token_of_row();
    if (name == "choices") {
      // Any k different experts will do: a token's are neighbours, from a place that moves on.
      values.resize(operands_.row_of_choice().size());
      const auto k = static_cast<size_t>(p.topk), experts = static_cast<size_t>(p.groups);
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<int64_t>((7 * (i / k) + i % k) % experts);
      }
    }
    operands_.fill_indices(t, values);
  } else if (is_one_of(name, {"probs", "topk_weights"})) {
    operands_.fill_uniform(t, name);
  } else if (name == "scales") {
    const int64_t block = direction_of(p) == MOIRE_ROWWISE ? 1 : 32;
    operands_.fill_scales(t, name, Values::kAny, 0x1p-6, block);
  } else {
    operands_.fill_normal(t, name,
                          is_bias                 ? 0.5
                          : name == "logits"      ? 2.0
                          : name == "expert_bias" ? 0.1
                                                  : 1.0);
  }
  if (sizes[0] == 'C' || (sizes[0] == 'S' && !is_gathered_)) operands_.poison_tail(t);
}

// An operand in FP8, of numbers around `scale`; its scales, for the field that has them.
TensorView Arguments::codes(const std::string& name, const Shape& shape, int32_t scaling,
                            int32_t direction, double scale, int64_t block_rows) {
  const DType element = element_of(name);
  const TensorView codes = operands_.take(name, element, shape);
  operands_.fill_codes(codes, name, Values::kNormal);
  const TensorView scales = operands_.take(scales_name(name), scale_dtype(scaling),
                                           scales_shape(scaling, direction, shape));
  operands_.fill_scales(scales, name, Values::kNormal, scale / Operands::reach(element),
                        block_rows);
  tensors_[scales_name(name)] = scales;
  return codes;
}

// W1 or, in 8 bits, its codes and then their scales; what they are converted to is like them.
TensorView Arguments::convert(const std::string& name, Role role) {
  TensorView& t = tensors_[name];
  if (is_written(role)) {
    const TensorView source = tensors_.at(name_of("source"));
    t = operands_.output(name, source.type(), {source.shape, source.shape + source.rank});
  } else if (!call_->is_of_scales()) {
    const Shape shape = shape_of("ZK", false);
    if (problem_.is_quantized()) {
      t = codes(name, shape, weight_scaling_of(problem_), weight_direction(), 1, 0);
    } else {
      t = operands_.take(name, problem_.dtype, shape);
      operands_.fill_normal(t, name, 1);
    }
  }
  return t;
}

// Of its scales: blocks lie along what a product contracts.
int32_t Arguments::weight_direction() const {
  const bool over_in = (call_->products & kDgrads) == 0;
  return over_in != problem_.in_out ? MOIRE_ROWWISE : MOIRE_COLUMNWISE;
}

void Arguments::field(const char* field, moire_weight& w, Role role, const char* sizes) {
  if (sets_values_) return;
  const std::string name = name_of(field);
  const bool is_input = !is_written(role);
  if (const auto made = weights_.find(name); is_input && made != weights_.end()) {
    w = made->second;
    return;
  }
  const Shape shape = shape_of(sizes, is_written(role));
  const double scale = is_input ? 1.0 / std::sqrt(static_cast<double>(size(sizes[2]))) : 1.0;
  const Format format = is_product() ? problem_.b_format() : Format{stored()};
  if (is_input && format.is_quantized()) {
    w = Weight(codes(name, shape, weight_scaling_of(format), weight_direction(), scale, 0),
               layout());
    return;
  }
  w = take_weight(name, is_input ? format.dtype : dtype_of(name, sizes), shape);
  if (is_input && !problem_.listed) {
    operands_.fill_normal(w.tensor, name, scale);
  } else {
    for (int64_t g = 0; g < problem_.groups; ++g) {
      const TensorView matrix = Weight(w).matrix(g);
      const bool accumulates = problem_.beta == 1 || (problem_.beta == 2 && g % 2 == 0);
      if (is_input || accumulates) {
        operands_.fill_normal(matrix, text(name, g), scale);
      } else {
        operands_.poison(matrix);
      }
    }
  }
  weights_[name] = w;
}

moire_weight Arguments::take_weight(const std::string& name, DType dtype, const Shape& shape) {
  if (!problem_.listed) return Weight(operands_.take(name, dtype, shape), layout());
  std::vector<const void*> matrices;
  for (int64_t g = 0; g < shape[0]; ++g) {
    matrices.push_back(operands_.take(text(name, "[", g, "]"), dtype, {shape[1], shape[2]}).data);
  }
  const TensorView packed(nullptr, dtype, {shape[0], shape[1], shape[2]});
  return Weight(packed, operands_.keep(std::move(matrices)), layout());
}

void Arguments::field(const char* field, moire_quantized& q, Role role, const char* sizes) {
  if (sets_values_) return;
  const std::string name = name_of(field);
  const bool is_input = !is_written(role), is_source = std::string_view(field) == "source";
  if (is_input && !is_source) return static_cast<void>(q = copies_[name]);
  if (!wants_copy(name, role)) return;
  const Problem& p = problem_;
  const int32_t scaling = p.op->multiplies() ? scaling_of(p) : p.scaling;
  int32_t direction = name.find("columnwise") == name.npos ? MOIRE_ROWWISE : MOIRE_COLUMNWISE;
  if (is_source) direction = direction_of(p);
  if (name == "target") direction = MOIRE_COLUMNWISE + MOIRE_ROWWISE - direction_of(p);
  const Shape shape = shape_of(sizes, is_written(role));
  q.data = operands_.take(name + ".data", element_of(name), shape);
  q.scales = operands_.take(name + ".scales", scale_dtype(scaling),
                            scales_shape(scaling, is_tiles() ? MOIRE_ROWWISE : direction, shape));
  if (is_input) {
    operands_.fill_codes(q.data, name + ".data", Values::kAny);
    if (q.data.rank == 2) operands_.poison_tail(q.data);
    const int64_t block = direction == MOIRE_ROWWISE ? 1 : block_of(scaling);
    operands_.fill_scales(q.scales, name + ".scales", Values::kAny, 0x1p-6, is_tiles() ? 0 : block);
  } else {
    operands_.poison(q.data);
    operands_.poison(q.scales);
  }
  copies_[name] = q;
}

Operands::Shape Arguments::scales_shape(int32_t scaling, int32_t direction, Shape data) const {
  const int64_t block = block_of(scaling);
  const auto blocks = [&](int64_t n) { return (n + block - 1) / block; };
  const bool is_tile = scaling == MOIRE_SCALING_FP8_TILE;
  int64_t& rows = data[data.size() - 2];
  int64_t& columns = data.back();
  if (direction == MOIRE_COLUMNWISE || is_tile) {
    rows = data.size() == 2 ? rows / block + problem_.groups : blocks(rows);
  }
  if (direction == MOIRE_ROWWISE || is_tile) columns = blocks(columns);
  return data;
}

void Arguments::field(const char*, const uint8_t*& beta, Role, int64_t) {
  if (problem_.beta != 2 || problem_.groups == 0) return;
  if (!sets_values_) return;
  std::vector<uint8_t> betas;
  for (int64_t g = 0; g < problem_.groups; ++g) betas.push_back(g % 2 == 0 ? 1 : 0);
  beta = operands_.keep(std::move(betas));
}

// INT64 offsets, INT32 ends, and INT64 offsets in elements of rows of x.
void Arguments::field(const char*, const moire_offsets_output*& outputs, Role, int64_t& count) {
  if (sets_values_) return;
  const int64_t g = problem_.groups;
  const std::vector<OffsetsOutput> all = {
      {operands_.output("offsets", DType::kInt64, {g + 1}), 0, 0},
      {operands_.output("ends", DType::kInt32, {g}), 1, 1},
      {operands_.output("element offsets", DType::kInt64, {g + 1}), problem_.hidden, 0}};
  outputs = operands_.keep(all);
  count = static_cast<int64_t>(all.size());
}

void Arguments::field(const char*, moire_groups& groups) {
  if (!is_tiles()) groups = operands_.groups();
}

void Arguments::value(std::string_view name, int32_t& value, int) {
  const Problem& p = problem_;
  const bool quantizes = p.is_quantized();
  const std::pair<std::string_view, int32_t> values[] = {
      {"tail", p.keep_tail ? MOIRE_TAIL_UNTOUCHED : MOIRE_TAIL_ZERO},
      {"accumulation", accumulation_of(p)},
      {"recipe", p.recipe},
      {"emulate_accumulation", quantizes && p.emulated ? 1 : 0},
      {"gradient_dtype", quantizes ? static_cast<int32_t>(p.element) : 0},
      {"scaling", p.scaling},
      {"fractional_scales",
       p.fractional && (!p.op->multiplies() || p.recipe == MOIRE_RECIPE_FP8_BLOCK) ? 1 : 0},
      {"direction", direction_of(p)},
      {"from", is_way_back() ? p.scale_layout : MOIRE_SCALES_CANONICAL},
      {"to", is_way_back() ? MOIRE_SCALES_CANONICAL : p.scale_layout},
      {"gathered_grad_y", p.gather ? 1 : 0},
      {"b2_unscaled", p.b2_scale == B2Scale::kNone ? 1 : 0},
      {"act_is_saved", p.save_act || (quantizes && p.act_columnwise) ? 1 : 0},
      {"transpose_b", (call_->products & kDgrads) != 0 ? 1 : 0},
      {"kind", p.sigmoid && call_->entry != "splits_to_offsets" ? MOIRE_ROUTER_SIGMOID : 0},
      {"normalize", p.normalize ? 1 : 0},
      {"dim", p.in_out ? 2 : 1},
  };
  for (const auto& [key, known] : values) {
    if (key == name) value = known;
  }
  if (name.starts_with("beta")) value = p.beta == 1 ? 1 : 0;
}

void Arguments::value(std::string_view name, int64_t& value, int) {
  if (name == "capacity") value = problem_.capacity();
  if (name == "num_groups") value = problem_.groups;
  if (name == "k") value = problem_.hidden;
}

void Arguments::value(const char*, float& scale, int) {
  scale = problem_.sigmoid ? kRouterScale : 0.0F;
}

void Arguments::value(std::string_view name, moire_glu_layout& value, int) {
  // convert_glu: one side is halves, that it comes from where the seed is odd.
  const std::string_view halves = problem_.seed % 2 == 0 ? "to" : "from";
  if (name == halves) return;
  value = problem_.layout;
  const bool is_of_tiles = call_->is_of_scales() && problem_.recipe == MOIRE_RECIPE_FP8_BLOCK;
  if (is_of_tiles) value.block /= block_of(MOIRE_SCALING_FP8_TILE);
}

}  // namespace moire::tool
