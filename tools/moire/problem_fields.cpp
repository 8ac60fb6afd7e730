#include "problem_fields.h"

#include <charconv>
#include <functional>
#include <utility>

#include "text.h"

namespace moire::tool {
namespace {

using P = Problem;
using Presence = Field::Presence;

constexpr int64_t kLargestSize = int64_t{1} << 40;

bool read_size(std::string_view value, int64_t smallest, int64_t& out) {
  return read_number(value, out) && out >= smallest && out <= kLargestSize;
}

// The shortest text that reads back as the same number.
std::string number(auto value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return {buffer, error == std::errc() ? end : buffer};
}

// Words, each of which stands for a value.
template <class T>
using Word = std::pair<std::string_view, T>;
template <class T>
using Words = std::vector<Word<T>>;

const Words<DType> kSameOrFloats = {
    {"same", DType::kNone}, {"fp32", DType::kFP32}, {"bf16", DType::kBF16}, {"fp16", DType::kFP16}};

template <class T>
bool read_word(const Words<T>& words, std::string_view value, T& out) {
  const auto* const row = find_row(words, &Word<T>::first, value);
  if (row != nullptr) out = row->second;
  return row != nullptr;
}

template <class T>
std::string_view word_of(const Words<T>& words, const T& value) {
  const auto* const row = find_row(words, &Word<T>::second, value);
  return row == nullptr ? "" : row->first;
}

// `member` is a Problem's, or a function to what is in one.
template <class T>
Codec one_of(auto member, const Words<T>& words) {
  const auto samples = words_of(words, &Word<T>::first);
  return {
      list_of(samples),
      [=](std::string_view value, P& p) { return read_word(words, value, std::invoke(member, p)); },
      [=](const P& p) {
        return std::string(word_of(words, T(std::invoke(member, const_cast<P&>(p)))));
      },
      samples};
}

Codec choice(bool P::*member, std::string_view no, std::string_view yes) {
  return one_of<bool>(member, {{no, false}, {yes, true}});
}

Codec flag(bool P::*member) { return one_of<bool>(member, {{"yes", true}, {"no", false}}); }

Codec size(int64_t P::*member, int64_t smallest, std::vector<std::string> samples = {}) {
  return {text("a whole number from ", smallest, " to 2^40"),
          [=](std::string_view value, P& p) { return read_size(value, smallest, p.*member); },
          [=](const P& p) { return std::to_string(p.*member); }, std::move(samples)};
}

bool read_name(std::string_view value, P& p) {
  p.name = value;
  return !value.empty();
}

Codec op() {
  Words<const Op*> words;
  for (const Op& op : all_ops()) words.emplace_back(op.name, &op);
  Codec codec = one_of(&P::op, words);
  codec.values = text("one of ", join(codec.samples, ", "));
  return codec;
}

Codec b() {
  Words<std::optional<Format>> words = {{"same", std::nullopt}};
  for (const auto& [word, format] : formats()) {
    // How a product is summed is said once, by `dtype`.
    if (format.recipe != MOIRE_RECIPE_MXFP8_FAST) words.emplace_back(word, format);
  }
  return one_of(&P::b, words);
}

const Words<Splits::Kind> kSplits = {{"uniform", Splits::Kind::kUniform},
                                     {"ragged", Splits::Kind::kRagged},
                                     {"zipf", Splits::Kind::kZipf},
                                     {"one_hot", Splits::Kind::kOneHot}};

bool read_splits(std::string_view value, P& p) {
  const std::vector<std::string> parts = split(value, ':');
  Splits& s = p.splits;
  if (read_word(kSplits, parts[0], s.kind)) {
    const bool is_zipf = s.kind == Splits::Kind::kZipf, is_one = s.kind == Splits::Kind::kOneHot;
    if (parts.size() != (is_zipf || is_one ? 2 : 1)) return false;
    if (is_one) return read_size(parts[1], 0, s.group);
    return !is_zipf || (read_number(parts[1], s.exponent) && s.exponent >= 0 && s.exponent <= 100);
  }
  s.kind = Splits::Kind::kList;
  for (const std::string& part : split(value, ',')) {
    if (!read_size(part, 0, s.list.emplace_back())) return false;
  }
  return true;
}

std::string write_splits(const P& p) {
  const Splits& s = p.splits;
  std::vector<std::string> parts;
  for (const int64_t rows : s.list) parts.push_back(std::to_string(rows));
  if (s.kind == Splits::Kind::kList) return join(parts, ",");
  return text(word_of(kSplits, s.kind), s.kind == Splits::Kind::kZipf
                                            ? text(":", number(s.exponent))
                                        : s.kind == Splits::Kind::kOneHot ? text(":", s.group)
                                                                          : "");
}

// Without a limit.
const Words<int32_t> kActivations = {{"swiglu", MOIRE_SWIGLU},
                                     {"geglu_tanh", MOIRE_GEGLU_TANH},
                                     {"reglu", MOIRE_REGLU},
                                     {"reglu2", MOIRE_REGLU2}};

bool read_activation(std::string_view value, P& p) {
  moire_activation plain{};
  if (read_word(kActivations, value, plain.kind)) return p.activation = plain, true;
  const std::vector<std::string> parts = split(value, ':');
  if (parts[0] != "clamped_swiglu") return false;
  p.activation = Activation::clamped_swiglu();
  if (parts.size() == 1) return true;
  Activation& a = p.activation;
  return parts.size() == 4 && read_number(parts[1], a.limit) && read_number(parts[2], a.alpha) &&
         read_number(parts[3], a.offset) && a.limit > 0 && a.alpha > 0;
}

std::string write_activation(const P& p) {
  const Activation& a = p.activation;
  const std::string_view word = word_of(kActivations, a.kind);
  if (!word.empty()) return std::string(word);
  return text("clamped_swiglu:", number(a.limit), ":", number(a.alpha), ":", number(a.offset));
}

bool read_layout(std::string_view value, P& p) {
  const std::vector<std::string> parts = split(value, ':');
  p.layout.block = value == "interleaved" ? 1 : 0;
  if (value == "halves" || value == "interleaved") return true;
  return parts.size() == 2 && parts[0] == "blocks" && read_size(parts[1], 1, p.layout.block);
}

std::string write_layout(const P& p) {
  if (p.layout.block == 0) return "halves";
  if (p.layout.block == 1) return "interleaved";
  return text("blocks:", p.layout.block);
}

// What Python calls experts without a gate, and their activations.
const Words<std::string_view> kUngated = {{"ungated", "order=ungated"},
                                          {"silu", "act=swiglu order=ungated"},
                                          {"gelu_tanh", "act=geglu_tanh order=ungated"},
                                          {"relu", "act=reglu order=ungated"},
                                          {"relu2", "act=reglu2 order=ungated"}};

std::vector<Field> make_fields() {
  const auto order = [](P& p) -> int32_t& { return p.layout.order; };
  const auto format = [](P& p) -> Format& { return p; };
  return {
      {"name", {"a word", read_name, [](const P& p) { return p.name; }}, "what reports call it"},
      {"op", op(), "what runs", Presence::kPrinted},
      {"groups", size(&P::groups, 0), "experts on this device", Presence::kRequired},
      {"hidden", size(&P::hidden, 1), "width of a token", Presence::kRequired},
      {"ffn", size(&P::ffn, 1), "width of an expert", Presence::kRequired},
      {"out_hidden", size(&P::out_hidden, 0), "width of y; 0: hidden"},
      {"rows", size(&P::rows, 0), "routed rows over all groups", Presence::kRequired},
      {"topk", size(&P::topk, 1), "experts per token: there are (rows + dropped) / topk tokens"},
      {"dropped", size(&P::dropped, 0), "top-k entries that go to no expert"},
      {"dtype", one_of<Format>(format, formats()),
       "of activations and weights; the last three: bf16, and FP8 operands of products",
       Presence::kPrinted},
      {"b", b(), "of a single product's weights, or of x beside a gradient, where not `dtype`"},
      {"x", one_of(&P::x, kSameOrFloats),
       "layers in FP8: of x, weights, biases, y and dx (same = bf16)"},
      {"out", one_of(&P::out, kSameOrFloats),
       "of a GEMM's result (same = dtype) or of weight gradients (same = fp32)"},
      {"splits",
       {"uniform, zipf:EXPONENT (0 to 100), ragged, one_hot:GROUP, or the rows of each group as "
        "3,0,5",
        read_splits,
        write_splits,
        {"ragged", "ragged", "ragged", "zipf:1", "one_hot:0", "one_hot:2", "uniform"}},
       "how rows are shared out; ragged is random, with empty groups",
       Presence::kPrinted},
      {"act",
       {"swiglu, geglu_tanh, reglu, reglu2, clamped_swiglu or clamped_swiglu:LIMIT:ALPHA:OFFSET",
        read_activation,
        write_activation,
        {"swiglu", "geglu_tanh", "reglu", "reglu2", "clamped_swiglu", "clamped_swiglu:1.5:1:0"}},
       "the activation"},
      {"layout",
       {"halves, interleaved, or blocks:N with N from 1 to 2^40",
        read_layout,
        write_layout,
        {"halves", "interleaved", "blocks:2", "blocks:8", "blocks:32"}},
       "how gate and up lie in W1"},
      {"order",
       one_of<int32_t>(order, {{"gate_first", MOIRE_GATE_FIRST},
                               {"up_first", MOIRE_UP_FIRST},
                               {"ungated", MOIRE_UNGATED}}),
       "which of the two comes first, or that W1 is [E, F, H], without an up"},
      {"bias", flag(&P::bias), "biases b1 and b2"},
      {"probs", flag(&P::probs), "a routing weight per row"},
      {"b2_scale",
       one_of<B2Scale>(
           &P::b2_scale,
           {{"probs", B2Scale::kProbs}, {"none", B2Scale::kNone}, {"own", B2Scale::kOwn}}),
       "mlp: what b2 is multiplied by"},
      {"gather", flag(&P::gather), "x and dy are tokens, gathered by row_idx"},
      {"weights", choice(&P::in_out, "out_in", "in_out"), "orientation of the weights"},
      {"storage", choice(&P::listed, "packed", "list"),
       "weights as one tensor or as a list of matrices"},
      {"save_act", flag(&P::save_act), "the forward keeps act for the backward"},
      {"x_columnwise", flag(&P::x_columnwise), "layers in FP8: the forward keeps this copy of x"},
      {"act_columnwise", flag(&P::act_columnwise),
       "mlp in FP8: the forward keeps this copy of act"},
      {"prepared", flag(&P::prepared),
       "layers in FP8: weights as prepare_weight makes them (decoded where seed is even)"},
      {"scores", choice(&P::sigmoid, "softmax", "sigmoid"), "router: what the logits become"},
      {"normalize", flag(&P::normalize), "router: weights of a token sum to one"},
      {"tail", size(&P::tail, 0), "rows of the capacity past the last group"},
      {"tail_rows", choice(&P::keep_tail, "zero", "untouched"), "what outputs get there"},
      {"beta", one_of<int>(&P::beta, {{"0", 0}, {"1", 1}, {"mixed", 2}}),
       "weight gradients: overwrite, accumulate, or by turns per group"},
      {"scaling",
       one_of<int32_t>(&P::scaling, {{"mxfp8", MOIRE_SCALING_MXFP8},
                                     {"fp8_block", MOIRE_SCALING_FP8_BLOCK},
                                     {"fp8_tile", MOIRE_SCALING_FP8_TILE}}),
       "FP8 ops: how elements share scales"},
      {"element", one_of<DType>(&P::element, {{"e4m3", DType::kE4M3}, {"e5m2", DType::kE5M2}}),
       "of the codes of FP8 ops, and of FP8 gradients"},
      {"direction",
       one_of<Directions>(&P::directions, {{"rowwise", Directions::kRowwise},
                                           {"columnwise", Directions::kColumnwise},
                                           {"both", Directions::kBoth}}),
       "FP8 ops: the copies that are made, or the one that is read"},
      {"emulated", flag(&P::emulated),
       "mxfp8_fast, fp8_block on a CPU: sums as Hopper's FP8 tensor cores make them"},
      {"fractional", flag(&P::fractional), "FP8 ops: scales need not be powers of two"},
      {"scales",
       one_of<int32_t>(&P::scale_layout, {{"canonical", MOIRE_SCALES_CANONICAL},
                                          {"dense", MOIRE_SCALES_DENSE},
                                          {"padded", MOIRE_SCALES_PADDED},
                                          {"swizzled", MOIRE_SCALES_SWIZZLED}}),
       "convert_scales: the other layout"},
      {"ranks", size(&P::ranks, 1, {"1", "2", "3", "8", "16"}),
       "dispatch, combine: how many, each with so many experts and tokens (not uniform: at most)"},
      {"room", size(&P::room, 0, {"0", "0", "1", "3", "40"}),
       "dispatch, combine: tokens that a rank has room for of each; 0: all"},
      {"overflow", choice(&P::drops, "refuse", "drop"), "dispatch: what becomes of those past it"},
      {"seed",
       {"a whole number from 0",
        [](std::string_view value, P& p) { return read_number(value, p.seed); },
        [](const P& p) { return std::to_string(p.seed); }},
       "of data and splits",
       Presence::kPrinted},
  };
}

}  // namespace

const std::vector<std::pair<std::string_view, Format>>& formats() {
  static const Words<Format> words = {
      {"fp32", {DType::kFP32}},
      {"bf16", {DType::kBF16}},
      {"fp16", {DType::kFP16}},
      {"mxfp8", {DType::kBF16, MOIRE_RECIPE_MXFP8}},
      {"mxfp8_fast", {DType::kBF16, MOIRE_RECIPE_MXFP8_FAST}},
      {"fp8_block", {DType::kBF16, MOIRE_RECIPE_FP8_BLOCK}},
  };
  return words;
}

std::string_view dtype_word(const Format& format) { return word_of(formats(), format); }

std::string dtype_words(const Problem& p) {
  const std::string a(dtype_word(p));
  return p.b.has_value() ? text(a, " x ", dtype_word(*p.b)) : a;
}

const std::vector<Field>& fields() {
  static const std::vector<Field> table = make_fields();
  return table;
}

const Field* find_field(std::string_view key) { return find_row(fields(), &Field::key, key); }

std::string Field::needed(std::string_view found) const {
  std::string_view meant;
  if (read_word(kUngated, found, meant)) return text(codec.values, "; did you mean ", meant, "?");
  const bool is_number = codec.values.starts_with("a ");
  return text(codec.values, is_number ? "" : did_you_mean(found, codec.samples));
}

}  // namespace moire::tool
