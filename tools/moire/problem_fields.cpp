#include "problem_fields.h"

#include <cctype>
#include <charconv>
#include <cstdio>

#include "text.h"

namespace moire::tool {
namespace {

constexpr int64_t kLargestSize = int64_t{1} << 40;

template <class T>
bool read_number(std::string_view value, T& out) {
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, out);
  return error == std::errc() && stop == end;
}

bool read_size(std::string_view value, int64_t smallest, int64_t& out) {
  return read_number(value, out) && out >= smallest && out <= kLargestSize;
}

bool read_flag(std::string_view value, bool& out) {
  out = value == "yes";
  return out || value == "no";
}

// One of two words.
bool read_choice(std::string_view value, std::string_view no, std::string_view yes, bool& out) {
  out = value == yes;
  return out || value == no;
}

std::string flag(bool value) { return value ? "yes" : "no"; }

// The shortest text that reads back as the same number.
std::string number(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return {buffer, error == std::errc() ? end : buffer};
}
std::string number(float value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return {buffer, error == std::errc() ? end : buffer};
}

bool read_dtype(std::string_view value, DType& out) {
  for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    if (value != dtype_word(dtype)) continue;
    out = dtype;
    return true;
  }
  return false;
}

// The FP8 names stand for BF16 whose products have quantised operands.
bool read_format(std::string_view value, Format& f) {
  f.fast = value == "mxfp8_fast";
  f.quantization = value == "mxfp8" || f.fast ? Quantization::kMxfp8
                   : value == "fp8_block"     ? Quantization::kFp8Block
                                              : Quantization::kNone;
  if (f.quantization == Quantization::kNone) return read_dtype(value, f.dtype);
  f.dtype = DType::kBF16;
  return true;
}

bool read_operands(std::string_view value, Problem& p) {
  Format format;
  if (!read_format(value, format)) return false;
  p.dtype = format.dtype;
  p.quantization = format.quantization;
  p.fast = format.fast;
  return true;
}

bool read_b(std::string_view value, Problem& p) {
  p.b.reset();
  // How a product is summed is said once, by `dtype`.
  return value == "same" || (read_format(value, p.b.emplace()) && !p.b->fast);
}

bool read_same_or_dtype(std::string_view value, DType& out) {
  out = DType::kNone;
  return value == "same" || read_dtype(value, out);
}

bool read_splits(std::string_view value, Problem& p) {
  const std::vector<std::string> parts = split(value, ':');
  Splits& s = p.splits;
  if (value == "uniform" || value == "ragged") {
    s.kind = value == "ragged" ? Splits::Kind::kRagged : Splits::Kind::kUniform;
    return true;
  }
  if (parts.size() == 2 && parts[0] == "zipf") {
    s.kind = Splits::Kind::kZipf;
    return read_number(parts[1], s.exponent) && s.exponent >= 0 && s.exponent <= 100;
  }
  if (parts.size() == 2 && parts[0] == "one_hot") {
    s.kind = Splits::Kind::kOneHot;
    return read_size(parts[1], 0, s.group);
  }
  s.kind = Splits::Kind::kList;
  for (const std::string& part : split(value, ',')) {
    if (!read_size(part, 0, s.list.emplace_back())) return false;
  }
  return true;
}

std::string write_splits(const Problem& p) {
  switch (p.splits.kind) {
    case Splits::Kind::kUniform:
      return "uniform";
    case Splits::Kind::kRagged:
      return "ragged";
    case Splits::Kind::kZipf:
      return "zipf:" + number(p.splits.exponent);
    case Splits::Kind::kOneHot:
      return text("one_hot:", p.splits.group);
    case Splits::Kind::kList:
      break;
  }
  std::vector<std::string> parts;
  for (const int64_t rows : p.splits.list) parts.push_back(std::to_string(rows));
  return join(parts, ",");
}

bool read_activation(std::string_view value, Problem& p) {
  const std::vector<std::string> parts = split(value, ':');
  if (value == "swiglu") return p.activation = Activation::swiglu(), true;
  if (value == "geglu_tanh") return p.activation = Activation::geglu_tanh(), true;
  if (parts[0] != "clamped_swiglu") return false;
  p.activation = Activation::clamped_swiglu();
  if (parts.size() == 1) return true;
  Activation& a = p.activation;
  return parts.size() == 4 && read_number(parts[1], a.limit) && read_number(parts[2], a.alpha) &&
         read_number(parts[3], a.offset) && a.limit > 0 && a.alpha > 0;
}

std::string write_activation(const Problem& p) {
  const Activation& a = p.activation;
  if (a.kind == MOIRE_SWIGLU) return "swiglu";
  if (a.kind == MOIRE_GEGLU_TANH) return "geglu_tanh";
  return text("clamped_swiglu:", number(a.limit), ":", number(a.alpha), ":", number(a.offset));
}

bool read_layout(std::string_view value, Problem& p) {
  const int32_t order = p.layout.order;
  if (value == "halves") return p.layout = GluLayout::interleaved(0, order), true;
  if (value == "interleaved") return p.layout = GluLayout::interleaved(1, order), true;
  const std::vector<std::string> parts = split(value, ':');
  p.layout.order = order;
  return parts.size() == 2 && parts[0] == "blocks" && read_size(parts[1], 1, p.layout.block);
}

std::string write_layout(const Problem& p) {
  if (p.layout.block == 0) return "halves";
  if (p.layout.block == 1) return "interleaved";
  return text("blocks:", p.layout.block);
}

bool read_order(std::string_view value, Problem& p) {
  bool up_first = false;
  const bool ok = read_choice(value, "gate_first", "up_first", up_first);
  p.layout.order = up_first ? MOIRE_UP_FIRST : MOIRE_GATE_FIRST;
  return ok;
}

bool read_op(std::string_view value, Problem& p) {
  const Op* const op = find_op(value);
  if (op != nullptr) p.op = op;
  return op != nullptr;
}

std::string op_names() {
  std::vector<std::string> names;
  for (const Op& op : all_ops()) names.emplace_back(op.name);
  return "one of " + join(names, ", ");
}

bool read_beta(std::string_view value, Problem& p) {
  if (value != "0" && value != "1" && value != "mixed") return false;
  p.beta = value == "mixed" ? 2 : value[0] - '0';
  return true;
}

// One of some words, each of which stands for a value.
template <class T>
struct Word {
  std::string_view word;
  T value;
};
template <class T, size_t N>
bool read_word(std::string_view value, const Word<T> (&words)[N], T& out) {
  for (const Word<T>& w : words) {
    if (w.word == value) return out = w.value, true;
  }
  return false;
}
template <class T, size_t N>
std::string write_word(const Word<T> (&words)[N], T value) {
  for (const Word<T>& w : words) {
    if (w.value == value) return std::string(w.word);
  }
  return "";
}

constexpr Word<int32_t> kScalings[] = {{"mxfp8", MOIRE_SCALING_MXFP8},
                                       {"fp8_block", MOIRE_SCALING_FP8_BLOCK},
                                       {"fp8_tile", MOIRE_SCALING_FP8_TILE}};
constexpr Word<DType> kElements[] = {{"e4m3", DType::kE4M3}, {"e5m2", DType::kE5M2}};
constexpr Word<Directions> kDirections[] = {{"rowwise", Directions::kRowwise},
                                            {"columnwise", Directions::kColumnwise},
                                            {"both", Directions::kBoth}};
constexpr Word<int32_t> kScaleLayouts[] = {{"canonical", MOIRE_SCALES_CANONICAL},
                                           {"dense", MOIRE_SCALES_DENSE},
                                           {"padded", MOIRE_SCALES_PADDED},
                                           {"swizzled", MOIRE_SCALES_SWIZZLED}};

bool read_name(std::string_view value, Problem& p) {
  p.name = value;
  return !value.empty();
}

using P = Problem;
using V = std::string_view;

#define SIZE(member, smallest)                                \
  [](V v, P& p) { return read_size(v, smallest, p.member); }, \
      [](const P& p) { return std::to_string(p.member); }
#define FLAG(member) \
  [](V v, P& p) { return read_flag(v, p.member); }, [](const P& p) { return flag(p.member); }
#define WORD(member, words)                                \
  [](V v, P& p) { return read_word(v, words, p.member); }, \
      [](const P& p) { return write_word(words, p.member); }
#define CHOICE(member, no, yes)                                \
  [](V v, P& p) { return read_choice(v, no, yes, p.member); }, \
      [](const P& p) { return std::string(p.member ? yes : no); }

}  // namespace

std::string_view dtype_word(DType dtype) {
  switch (dtype) {
    case DType::kFP32:
      return "fp32";
    case DType::kBF16:
      return "bf16";
    case DType::kFP16:
      return "fp16";
    default:
      return "same";
  }
}

std::string_view dtype_word(Format f) {
  if (f.quantization == Quantization::kNone) return dtype_word(f.dtype);
  if (f.quantization == Quantization::kFp8Block) return "fp8_block";
  return f.fast ? "mxfp8_fast" : "mxfp8";
}

std::string dtype_words(const Problem& p) {
  const std::string a(dtype_word(p.a_format()));
  return p.b.has_value() ? text(a, " x ", dtype_word(*p.b)) : a;
}

const std::vector<Field>& fields() {
  static const std::string ops = op_names();
  static const std::vector<Field> table = {
      {"name", "a word", "what reports call it", false, false, read_name,
       [](const P& p) { return p.name; }},
      {"op", ops, "what runs", false, true, read_op,
       [](const P& p) { return std::string(p.op->name); }},
      {"groups", "a whole number from 0 to 2^40", "experts on this device", true, true,
       SIZE(groups, 0)},
      {"hidden", "a whole number from 1 to 2^40", "width of a token", true, true, SIZE(hidden, 1)},
      {"ffn", "a whole number from 1 to 2^40", "width of an expert", true, true, SIZE(ffn, 1)},
      {"rows", "a whole number from 0 to 2^40", "routed rows over all groups", true, true,
       SIZE(rows, 0)},
      {"topk", "a whole number from 1 to 2^40",
       "experts per token: there are (rows + dropped) / topk tokens", false, false, SIZE(topk, 1)},
      {"dropped", "a whole number from 0 to 2^40", "top-k entries that go to no expert", false,
       false, SIZE(dropped, 0)},
      {"dtype", "fp32, bf16, fp16, mxfp8, mxfp8_fast or fp8_block",
       "of activations and weights; the last three: bf16, and FP8 operands of products", false,
       true, read_operands, [](const P& p) { return std::string(dtype_word(p.a_format())); }},
      {"b", "same, fp32, bf16, fp16, mxfp8 or fp8_block",
       "of a single product's weights, or of x beside a gradient, where not `dtype`", false, false,
       read_b, [](const P& p) { return std::string(p.b ? dtype_word(*p.b) : "same"); }},
      {"x", "same, fp32, bf16 or fp16",
       "layers in FP8: of x, weights, biases, y and dx (same = bf16)", false, false,
       [](V v, P& p) { return read_same_or_dtype(v, p.x); },
       [](const P& p) { return std::string(dtype_word(p.x)); }},
      {"out", "same, fp32, bf16 or fp16",
       "of a GEMM's result (same = dtype) or of weight gradients (same = fp32)", false, false,
       [](V v, P& p) { return read_same_or_dtype(v, p.out); },
       [](const P& p) { return std::string(dtype_word(p.out)); }},
      {"splits",
       "uniform, zipf:EXPONENT, ragged, one_hot:GROUP, or the rows of each group as 3,0,5",
       "how rows are shared out; ragged is random, with empty groups", false, true, read_splits,
       write_splits},
      {"act", "swiglu, geglu_tanh, clamped_swiglu or clamped_swiglu:LIMIT:ALPHA:OFFSET",
       "the gated activation", false, false, read_activation, write_activation},
      {"layout", "halves, interleaved, or blocks:N with N from 1 to 2^40",
       "how gate and up lie in W1", false, false, read_layout, write_layout},
      {"order", "gate_first or up_first", "which of the two comes first", false, false, read_order,
       [](const P& p) {
         return std::string(p.layout.order == MOIRE_UP_FIRST ? "up_first" : "gate_first");
       }},
      {"bias", "yes or no", "biases b1 and b2", false, false, FLAG(bias)},
      {"probs", "yes or no", "a routing weight per row", false, false, FLAG(probs)},
      {"gather", "yes or no", "x and dy are tokens, gathered by row_idx", false, false,
       FLAG(gather)},
      {"weights", "out_in or in_out", "orientation of the weights", false, false,
       CHOICE(in_out, "out_in", "in_out")},
      {"storage", "packed or list", "weights as one tensor or as a list of matrices", false, false,
       CHOICE(listed, "packed", "list")},
      {"save_act", "yes or no", "the forward keeps act for the backward", false, false,
       FLAG(save_act)},
      {"x_columnwise", "yes or no", "layers in FP8: the forward keeps this copy of x", false, false,
       FLAG(x_columnwise)},
      {"act_columnwise", "yes or no", "mlp in FP8: the forward keeps this copy of act", false,
       false, FLAG(act_columnwise)},
      {"scores", "softmax or sigmoid", "router: what the logits become", false, false,
       CHOICE(sigmoid, "softmax", "sigmoid")},
      {"normalize", "yes or no", "router: weights of a token sum to one", false, false,
       FLAG(normalize)},
      {"tail", "a whole number from 0 to 2^40", "rows of the capacity past the last group", false,
       false, SIZE(tail, 0)},
      {"tail_rows", "zero or untouched", "what outputs get there", false, false,
       CHOICE(keep_tail, "zero", "untouched")},
      {"beta", "0, 1 or mixed", "weight gradients: overwrite, accumulate, or by turns per group",
       false, false, read_beta,
       [](const P& p) { return p.beta == 2 ? std::string("mixed") : std::to_string(p.beta); }},
      {"scaling", "mxfp8, fp8_block or fp8_tile", "FP8 ops: how elements share scales", false,
       false, WORD(scaling, kScalings)},
      {"element", "e4m3 or e5m2", "of the codes of FP8 ops, and of FP8 gradients", false, false,
       WORD(element, kElements)},
      {"direction", "rowwise, columnwise or both",
       "FP8 ops: the copies that are made, or the one that is read", false, false,
       WORD(directions, kDirections)},
      {"emulated", "yes or no",
       "mxfp8_fast, fp8_block on a CPU: sums as Hopper's FP8 tensor cores make them", false, false,
       FLAG(emulated)},
      {"fractional", "yes or no", "FP8 ops: scales need not be powers of two", false, false,
       FLAG(fractional)},
      {"scales", "canonical, dense, padded or swizzled", "convert_scales: the other layout", false,
       false, WORD(scale_layout, kScaleLayouts)},
      {"seed", "a whole number from 0", "of data and splits", false, true,
       [](V v, P& p) { return read_number(v, p.seed); },
       [](const P& p) { return std::to_string(p.seed); }},
  };
  return table;
}

#undef SIZE
#undef FLAG
#undef WORD
#undef CHOICE

const Field* find_field(std::string_view key) {
  for (const Field& field : fields()) {
    if (field.key == key) return &field;
  }
  return nullptr;
}

std::string needed(const Field& field, std::string_view found) {
  if (field.values.starts_with("a ")) return std::string(field.values);  // no list of words
  std::vector<std::string> words(1);
  for (const char c : field.values) {
    const bool is_letter = std::islower(static_cast<unsigned char>(c)) != 0 || c == '_' ||
                           std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (is_letter) words.back() += c;
    if (!is_letter && !words.back().empty()) words.emplace_back();
  }
  return text(field.values, did_you_mean(found, words));
}

}  // namespace moire::tool
