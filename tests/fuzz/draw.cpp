#include "tests/fuzz/draw.h"

#include <algorithm>
#include <cstring>

namespace moire::fuzz {
namespace {

bool is_one_of(std::string_view name, std::span<const std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

constexpr std::string_view kRowIdx[] = {"row_idx", "a_row_idx", "b_row_idx"};
constexpr std::string_view kIndices[] = {"row_idx",    "a_row_idx",   "b_row_idx", "topk_idx",
                                         "gather_idx", "scatter_idx", "splits",    "places"};
// Of numbers for each row, choice or expert.
constexpr std::string_view kSizesOfFP32[] = {"C", "Tk", "Ck", "E"};
constexpr std::string_view kBetween[] = {"z", "act", "grad_z", "grad_act"};
// Of any float type, whatever the operands are.
constexpr std::string_view kFree[] = {"bias",    "b1",      "b2",     "grad_bias",
                                      "grad_b1", "grad_b2", "grad_w", "grad_w1",
                                      "grad_w2", "grad_x",  "d",      "grad_logits"};
constexpr std::string_view kOptional[] = {"bias", "probs",       "scale",   "b1",
                                          "b2",   "expert_bias", "weights", "bias_scale"};

constexpr std::string_view kDrawnBefore[] = {"transpose_b", "gathered_grad_y", "act_is_saved"};

}  // namespace

bool Draw::is_fp8(std::string_view name) const {
  if (is_layer_) return name == "x" && !is_backward_ && plan_.recipe != 0 && plan_.fp8_a;
  if (name == "a" || name == "grad_y") return plan_.fp8_a;
  return (name == "b" || name == "w2") && plan_.fp8_b;
}

// Whether the ragged operand of this name is [T, .]; columnwise scales forbid it.
bool Draw::is_gathered(std::string_view name) const {
  return plan_.gathers && !(is_wgrad_ && is_fp8(name.substr(0, 1)));
}

bool Draw::wants(std::string_view name, Role role) {
  if (is_one_of(name, kRowIdx)) return is_gathered(is_wgrad_ ? name : "x");
  if (name.ends_with("prepared")) return false;  // by draw_prepared(), of what was drawn
  if (name == "a_scales" || name == "grad_y_scales") return is_fp8("a");
  if (name == "b_scales" || name == "w2_scales") return is_fp8("b");
  if (name == "x_scales" || name == "x_scales_recv") return is_fp8("x");
  if (name == "bias_scale" || (name == "scale" && is_layer_ && !is_backward_)) {
    return present_.contains("bias") && random_.percent(60);
  }
  if (name == "b2_scale") return present_.contains("b2") && random_.percent(40);
  if (name == "grad_b2_scale" && !present_.contains("b2_scale")) return false;
  if (is_one_of(name, kOptional)) return random_.percent(is_backward_ ? 80 : 50);
  return !is_written(role) || random_.percent(85);
}

int32_t Draw::dtype_of(std::string_view name, std::string_view sizes) {
  if (name == "places" || name == "topk_idx_recv") return MOIRE_INT32;
  if (is_one_of(name, kIndices)) return index_dtype_;
  if (name == "offsets" || name == "counts") return MOIRE_INT64;
  if (is_one_of(sizes, kSizesOfFP32)) return MOIRE_FP32;
  if (is_fp8(name)) return any_fp8();
  if (sizes == "??") return MOIRE_E8M0;
  if (sizes == "ZK" && (name == "source" || name == "target")) return element_;
  if (is_one_of(name, kBetween)) return plan_.between;
  if (is_one_of(name, kFree) || name == "target") {
    return random_.percent(50) ? plan_.main : any_float();
  }
  if (is_layer_ && plan_.recipe != 0) return any_float();
  return plan_.main;
}

std::vector<int64_t> Draw::shape_of(std::string_view name, std::string_view sizes) const {
  if (name == "splits") {
    return {static_cast<int64_t>(plan_.splits.size()) + (plan_.kind == MOIRE_OFFSETS ? 1 : 0)};
  }
  if (sizes == "??") {  // of convert_scales
    int64_t shape[2] = {};
    static_cast<void>(moire_scales_shape(MOIRE_SCALING_MXFP8, plan_.direction,
                                         name == "source" ? plan_.from : plan_.to, plan_.capacity,
                                         plan_.k, plan_.num_groups, shape));
    return {shape[0], shape[1]};
  }
  if (draws_weights()) sizes = "GNK";
  const int64_t source_rows = is_gathered(name) ? plan_.tokens : plan_.capacity;
  std::vector<int64_t> shape;
  for (const char letter : sizes) shape.push_back(plan_.size(letter, source_rows));
  const bool swaps =
      shape.size() == 3 && plan_.layout == MOIRE_IN_OUT && !is_wgrad_ && !may_be_weight_;
  if (swaps) std::swap(shape[1], shape[2]);
  return shape;
}

void Draw::take(const std::string& name, moire_tensor& t, int32_t dtype,
                std::span<const int64_t> shape, bool may_pad) {
  t = {};
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  const int64_t unit = dtype_size(static_cast<DType>(dtype));
  if (may_pad && t.rank > 1 && random_.percent(25)) {
    t.row_stride = shape.back() + random_.integer(0, 5);
  }
  t.data = &t;  // anything, for the size
  const int64_t bytes = span_bytes(t);
  t.data = bytes == 0 && random_.percent(50) ? nullptr : memory_.take(name, bytes, unit);
}

void Draw::field(const char* name, moire_tensor& t, Role role, const char* sizes) {
  if (!wants(name, role)) return;
  present_.insert(name);
  if (std::string_view(name).ends_with("_scales")) return scales_of_operand(name, t);
  const std::vector<int64_t> shape = shape_of(name, sizes);
  const std::string_view n = name;
  if (n == "a" || n == "x" || n == "grad_y") shape_a_ = shape;
  if (n == "b") shape_b_ = shape;
  take(name, t, dtype_of(name, sizes), shape, sizes[0] != '?');
  if (is_written(role) && random_.percent(50)) return;  // poison
  if (is_one_of(name, kIndices) && !is_written(role)) return fill_indices(name, t);
  fill_elements(t);
}

void Draw::field(const char* name, moire_weight& w, Role role, const char* sizes) {
  if (!wants(name, role)) return;
  const std::vector<int64_t> shape = shape_of(name, sizes);
  shape_b_ = shape;
  w.layout = plan_.layout;
  const int32_t dtype = dtype_of(name, sizes);
  if (!plan_.lists || is_fp8(name)) {
    take(name, w.tensor, dtype, shape);
    return fill_elements(w.tensor);
  }
  auto** const list = static_cast<const void**>(
      memory_.take(std::string(name) + ".list", shape[0] * int64_t{sizeof(void*)}));
  for (int64_t g = 0; g < shape[0]; ++g) {
    moire_tensor matrix;
    take(name, matrix, dtype, std::span(shape).subspan(1), false);
    fill_elements(matrix);
    list[g] = matrix.data;
  }
  w.tensor = TensorView(nullptr, static_cast<DType>(dtype), {shape[0], shape[1], shape[2]});
  w.list = list;
}

// MXFP8, or blocks, which for the weights of a layer are tiles.
int32_t Draw::weight_scaling() const {
  if (plan_.scaling == MOIRE_SCALING_MXFP8) return MOIRE_SCALING_MXFP8;
  return is_layer_ || plan_.saves_act ? MOIRE_SCALING_FP8_TILE : MOIRE_SCALING_FP8_BLOCK;
}

void Draw::field(const char* name, moire_quantized& q, Role role, const char* sizes) {
  const std::string_view n = name;
  if (is_layer_ && (plan_.recipe == 0 || random_.percent(60))) return;
  if (quantizes_weight_ && n == "columnwise" && weight_scaling() == MOIRE_SCALING_FP8_TILE) return;
  if (is_written(role) && n != "target" && random_.percent(30)) return;
  if (n == "x_columnwise" && is_fp8("x")) return;
  const std::vector<int64_t> shape = shape_of(name, sizes);
  const bool is_weight = shape.size() == 3;
  int32_t direction = n.find("columnwise") != n.npos ? MOIRE_COLUMNWISE : MOIRE_ROWWISE;
  if (n == "source") direction = plan_.direction;
  if (n == "target") direction = 1 - plan_.direction;
  if (n.ends_with("_quantized")) {
    direction = (plan_.layout == MOIRE_OUT_IN) != is_backward_ ? MOIRE_ROWWISE : MOIRE_COLUMNWISE;
  }
  take(std::string(name) + ".data", q.data, any_fp8(), shape);
  fill_elements(q.data);
  const bool tiles = is_weight && !is_requantize_;
  take_scales(std::string(name) + ".scales", q.scales, shape,
              tiles ? weight_scaling() : plan_.scaling, direction);
}

void Draw::take_scales(const std::string& name, moire_tensor& t, std::span<const int64_t> data,
                       int32_t scaling, int32_t direction) {
  const int64_t block = scaling == MOIRE_SCALING_MXFP8 ? 32 : 128;
  const auto blocks = [&](int64_t size) { return (size + block - 1) / block; };
  const bool tiles = scaling == MOIRE_SCALING_FP8_TILE, is_columnwise = direction != MOIRE_ROWWISE;
  std::vector<int64_t> shape(data.begin(), data.end());
  if (!is_columnwise || tiles) shape.back() = blocks(shape.back());
  const bool lacks_groups = may_lack_groups_ && !plan_.has_groups;
  if (is_columnwise && shape.size() == 2) {
    shape[0] = shape[0] / block + (lacks_groups ? 1 : plan_.num_groups);
  } else if (is_columnwise || tiles) {
    shape[1] = blocks(shape[1]);
  }
  take(name, t, scaling == MOIRE_SCALING_MXFP8 ? MOIRE_E8M0 : MOIRE_FP32, shape);
  fill_elements(t);
}

void Draw::scales_of_operand(const char* name, moire_tensor& t) {
  const std::string_view n = name;
  if (n == "b_scales" || n == "w2_scales") {
    const bool k_is_last = ((plan_.layout == MOIRE_OUT_IN) != plan_.transposes);
    const bool is_last = is_backward_ ? plan_.layout == MOIRE_IN_OUT : k_is_last;
    const bool mxfp8 = plan_.scaling == MOIRE_SCALING_MXFP8;
    if (is_wgrad_) return take_scales(name, t, shape_b_, plan_.scaling, MOIRE_COLUMNWISE);
    return take_scales(name, t, shape_b_, mxfp8 ? plan_.scaling : int32_t{MOIRE_SCALING_FP8_TILE},
                       is_last ? MOIRE_ROWWISE : MOIRE_COLUMNWISE);
  }
  take_scales(name, t, shape_a_, plan_.scaling, is_wgrad_ ? MOIRE_COLUMNWISE : MOIRE_ROWWISE);
}

void Draw::field(const char* name, const uint8_t*& bytes, Role, int64_t count) {
  // Groups may come later in the struct; the plan has as many.
  static_cast<void>(count);
  if (!random_.percent(30)) return;
  auto* const betas = static_cast<uint8_t*>(memory_.take(name, plan_.num_groups));
  for (int64_t g = 0; g < plan_.num_groups; ++g) {
    betas[g] = static_cast<uint8_t>(random_.integer(0, 1));
  }
  bytes = betas;
}

void Draw::field(const char* name, const moire_offsets_output*& outputs, Role, int64_t& count) {
  count = random_.integer(0, 3);
  const int64_t bytes = count * int64_t{sizeof(moire_offsets_output)};
  auto* const array = static_cast<moire_offsets_output*>(memory_.take(name, bytes));
  for (int64_t i = 0; i < count; ++i) {
    array[i] = {};
    array[i].no_leading_zero = static_cast<int32_t>(random_.integer(0, 1));
    array[i].multiplier = random_.integer(0, 5);
    const int64_t shape[] = {plan_.num_groups + 1 - array[i].no_leading_zero};
    take(name, array[i].offsets, random_.pick<int32_t>({MOIRE_INT32, MOIRE_INT64}), shape);
  }
  outputs = array;
}

void Draw::field(const char* name, moire_groups& groups) {
  if (may_lack_groups_ && (!plan_.has_groups || draws_weights())) return;
  groups.num_groups = plan_.num_groups;
  groups.capacity = plan_.capacity;
  if (plan_.num_groups == 0 && random_.percent(50)) return;
  const auto bytes = static_cast<int64_t>(plan_.offsets.size() * sizeof(int64_t));
  auto* const offsets = static_cast<int64_t*>(memory_.take(name, bytes));
  std::copy(plan_.offsets.begin(), plan_.offsets.end(), offsets);
  groups.offsets = offsets;
}

void Draw::value(const char* name, int32_t& value, int count) {
  const std::string_view n = name;
  if (is_one_of(n, kDrawnBefore)) return;
  if (n == "scaling") {
    value = quantizes_weight_ || (draws_weights() && !is_requantize_) ? weight_scaling()
                                                                      : plan_.scaling;
  } else if (n == "direction") {
    value = plan_.direction;
  } else if (n == "fractional_scales") {
    value = !is_layer_ || plan_.recipe == 3 ? plan_.fractional : 0;
  } else if (n == "recipe") {
    value = plan_.recipe;
  } else if (n == "kind") {
    value = plan_.kind % count;
  } else if (n == "from" || n == "to") {
    value = n == "from" ? plan_.from : plan_.to;
  } else if (n == "emulate_accumulation") {
    value = plan_.recipe >= 2 && random_.percent(20) ? 1 : 0;
  } else if (n == "accumulation") {
    const bool may_emulate = plan_.fp8_a && plan_.fp8_b && random_.percent(20);
    value = may_emulate ? int32_t{MOIRE_ACCUMULATE_EMULATED}
                        : static_cast<int32_t>(random_.integer(0, 1));
  } else if (n == "gradient_dtype") {
    value = plan_.recipe == 0 ? 0 : random_.pick<int32_t>({0, MOIRE_E4M3, MOIRE_E5M2});
  } else if (n == "storage") {
    value = static_cast<int32_t>(random_.integer(0, MOIRE_FP16));
  } else if (n == "b2_unscaled") {
    value = present_.contains("b2_scale") ? 0 : static_cast<int32_t>(random_.integer(0, 1));
  } else if (n == "dim") {
    value = static_cast<int32_t>(random_.integer(0, 1));
  } else {
    value = static_cast<int32_t>(random_.integer(0, std::max(count - 1, 0)));
  }
}

void Draw::value(const char* name, int64_t& value, int) {
  const std::string_view n = name;
  if (n == "capacity") value = random_.percent(50) ? -1 : plan_.capacity;
  if (n == "num_groups" || n == "num_experts") value = plan_.num_groups;
  if (n == "k") value = plan_.k;
}

void Draw::value(const char*, float& value, int) { value = random_.pick<float>({0, 1, 2.5F}); }

void Draw::value(const char*, moire_activation& value, int) {
  value = {static_cast<int32_t>(random_.integer(0, 4)), 7, 1.702F, 1};
}

void Draw::value(const char* name, moire_glu_layout& value, int) {
  if (!plan_.is_gated && name == std::string_view("layout")) {
    value = {0, MOIRE_UNGATED};
    return;
  }
  value.order = static_cast<int32_t>(random_.integer(0, 1));
  const int64_t block = random_.integer(0, plan_.f);
  value.block = block != 0 && plan_.f % block == 0 ? block : random_.integer(0, 1);
  if (plan_.f == 0) value.block = 0;
}

void Draw::fill_indices(std::string_view name, moire_tensor& t) {
  std::vector<int64_t> values = name == "scatter_idx" ? plan_.scatter_idx
                                : name == "topk_idx"  ? plan_.topk_idx
                                : name == "places"    ? plan_.places
                                                      : plan_.gather_idx;
  if (name == "splits") {
    const auto& offsets = plan_.offsets;
    values = plan_.kind == MOIRE_SPLITS ? plan_.splits
             : plan_.kind == MOIRE_ENDS ? std::vector(offsets.begin() + 1, offsets.end())
                                        : offsets;
  }
  if (name == "topk_idx" && is_router_) {
    for (int64_t& v : values) v = random_.integer(0, plan_.experts - 1);
  }
  const TensorView view(t);
  const int64_t columns = std::max<int64_t>(view.columns(), 1);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    const int64_t element = at / columns * view.stride() + at % columns;
    if (t.dtype == MOIRE_INT32) {
      static_cast<int32_t*>(t.data)[element] = static_cast<int32_t>(values[i]);
    } else {
      static_cast<int64_t*>(t.data)[element] = values[i];
    }
  }
}

void Draw::fill_elements(moire_tensor& t) {
  const TensorView view(t);
  const int64_t unit = dtype_size(view.type());
  for (int64_t row = 0; row < view.num_rows(); ++row) {
    auto* const first = static_cast<char*>(t.data) + row * view.stride() * unit;
    for (int64_t c = 0; c < view.columns(); ++c) fill_element(t.dtype, first + c * unit);
  }
}

void Draw::fill_element(int32_t dtype, void* at) {
  const bool is_hard = plan_.hard && random_.percent(2);
  const uint64_t bits = random_.bits();
  const uint64_t sign = bits >> 63, fraction = bits & 0x7FFFFF;
  const uint64_t exponent = is_hard ? 255 : 124 + (bits >> 32) % 6;  // 1/8 ... 8
  const auto store = [&](auto value) { std::memcpy(at, &value, sizeof(value)); };
  switch (dtype) {
    case MOIRE_FP32:
      return store(static_cast<uint32_t>(sign << 31 | exponent << 23 |
                                         (is_hard ? fraction & 0x400000 : fraction)));
    case MOIRE_BF16:
      return store(static_cast<uint16_t>(sign << 15 | exponent << 7 |
                                         (is_hard ? fraction & 0x40 : fraction & 0x7F)));
    case MOIRE_FP16:
      return store(static_cast<uint16_t>(sign << 15 | (is_hard ? 31 : exponent - 112) << 10 |
                                         (is_hard ? fraction & 0x200 : fraction & 0x3FF)));
    case MOIRE_E4M3:
      return store(static_cast<uint8_t>(is_hard ? 0x7F : sign << 7 | (bits & 0x7F) % 0x7F));
    case MOIRE_E5M2:
      return store(
          static_cast<uint8_t>(is_hard ? 0x7C | (bits & 3) : sign << 7 | (bits & 0x7F) % 0x7C));
    case MOIRE_E8M0:
      return store(static_cast<uint8_t>(is_hard ? 0xFF : 120 + bits % 14));
    case MOIRE_UINT8:
      return store(static_cast<uint8_t>(bits));
    case MOIRE_INT32:
      return store(static_cast<uint32_t>(bits));
    default:
      return store(bits);
  }
}

}  // namespace moire::fuzz
