// Parsing and printing of problem lines; the fields themselves are in problem_fields.cpp.
#include "problem.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "problem_fields.h"
#include "text.h"

namespace moire::tool {
namespace {

UsageError bad(const std::string& where, std::string_view field, std::string_view found,
               std::string_view needed) {
  return UsageError(where, ": field \"", field, "\": found ", found, ", needed ", needed);
}

}  // namespace

std::optional<Mistake> find_mistake(const Problem& p) {
  const Op& op = *p.op;
  const bool multiplies = op.multiplies(), routes = p.is("router") || p.is("router_backward");
  const bool reads = p.is("dequantize") || p.is("requantize"), converts = p.is("convert_scales");
  const bool takes_tiles = p.is("quantize_weight") || p.is("dequantize");
  const bool is_fp8_op = reads || takes_tiles || converts || op.entry() == "quantize";
  const bool is_mx = p.scaling == MOIRE_SCALING_MXFP8,
             is_tile = p.scaling == MOIRE_SCALING_FP8_TILE;
  // What the op, a recipe, or the formats of a product have no use for is a mistake. A layer's
  // products take what it does, and `x` types biases and results of other ops.
  const bool is_plain = !p.is_quantized(), is_product = multiplies && !op.is_layer();
  const bool has_block =
      p.recipe == MOIRE_RECIPE_FP8_BLOCK || p.b_format().recipe == MOIRE_RECIPE_FP8_BLOCK;
  const bool sums_fast = p.recipe >= MOIRE_RECIPE_MXFP8_FAST;
  const int64_t blocks = std::max<int64_t>(p.layout.block, 1),
                sum = std::accumulate(p.splits.list.begin(), p.splits.list.end(), int64_t{0});
  const int64_t together = p.layout.block > 0 ? p.layout.block : p.ffn;  // columns of gate or up
  constexpr int64_t kTile = 128;
  const bool is_list = p.splits.kind == Splits::Kind::kList;
  const bool is_one_hot = p.splits.kind == Splits::Kind::kOneHot;
  const std::string here = text("op=", op.name), for_op = " for " + here,
                    dtype = text("dtype=", dtype_word(p));
  const std::string scaling = find_field("scaling")->codec.write(p);
  const std::string quantised = "dtype=mxfp8, mxfp8_fast or fp8_block, which quantise";
  const std::string fp8_op =
      "op=quantize, quantize_grad, quantize_weight, dequantize, requantize or convert_scales";
  const std::pair<bool, Mistake> rules[] = {
      {p.ffn % blocks != 0,
       {"layout", text("blocks of ", blocks), text("a divisor of ffn=", p.ffn)}},
      {!p.is_gated() && p.layout.block > 0, {"order", "ungated", "layout=halves"}},
      {!p.is_gated() && p.is("convert_glu"),
       {"order", "ungated", "gate_first or up_first" + for_op}},
      {is_one_hot && p.splits.group >= p.groups,
       {"splits", text("one_hot:", p.splits.group), text("a group below groups=", p.groups)}},
      {p.groups == 0 && p.rows > 0, {"rows", text(p.rows), "0, because groups=0"}},
      {is_list && static_cast<int64_t>(p.splits.list.size()) != p.groups,
       {"splits", text(p.splits.list.size(), " numbers"), text("groups=", p.groups)}},
      {is_list && sum != p.rows, {"splits", text("a sum of ", sum), text("rows=", p.rows)}},
      {(reads || converts) && p.directions == Directions::kBoth,
       {"direction", "both", "rowwise or columnwise" + for_op}},
      {!is_product && p.b.has_value(), {"b", here, "a single product, as op=fc1 or fc1_wgrad"}},
      {!converts && p.scale_layout != MOIRE_SCALES_SWIZZLED, {"scales", here, "op=convert_scales"}},
      {!is_fp8_op && p.directions != Directions::kRowwise, {"direction", here, fp8_op}},
      {!is_fp8_op && !is_mx, {"scaling", here, fp8_op}},
      {converts && !is_mx, {"scaling", scaling, "mxfp8" + for_op}},
      {is_fp8_op && !takes_tiles && is_tile, {"scaling", scaling, "mxfp8 or fp8_block" + for_op}},
      {is_fp8_op && p.fractional && is_mx, {"fractional", "yes", "no, for scaling=mxfp8"}},
      {!multiplies && !is_plain && !p.is("dispatch") && !p.is("convert_glu"),
       {"dtype", std::string(dtype_word(p)),
        text("fp32, bf16 or fp16", for_op, ", which has no products")}},
      {p.is("convert_glu") && p.recipe == MOIRE_RECIPE_FP8_BLOCK && together % kTile != 0,
       {"dtype", "fp8_block", text("gate and up in multiples of ", kTile, ", as its tiles are")}},
      {op.is_layer() && is_plain && p.x != DType::kNone, {"x", dtype, quantised}},
      {is_plain && p.x_columnwise, {"x_columnwise", dtype, quantised}},
      {is_plain && p.act_columnwise, {"act_columnwise", dtype, quantised}},
      {is_plain && p.prepared, {"prepared", dtype, quantised}},
      {is_plain && !is_fp8_op && p.element != DType::kE4M3, {"element", dtype, quantised}},
      {!is_fp8_op && p.fractional && !has_block, {"fractional", dtype, "dtype=fp8_block"}},
      {p.emulated && !sums_fast, {"emulated", dtype, "dtype=mxfp8_fast or fp8_block"}},
      {p.emulated && !p.b_format().is_quantized(),
       {"emulated", text("b=", dtype_word(p.b_format())), "FP8 operands on both sides"}},
      {!op.is_of_ranks() && p.ranks != 1, {"ranks", text(p.ranks), "1" + for_op}},
      {p.ranks > 1024, {"ranks", text(p.ranks), "at most 1024"}},
      {!op.is_of_ranks() && p.room != 0, {"room", text(p.room), "0" + for_op}},
      {!op.is_of_ranks() && p.drops, {"overflow", "drop", "refuse" + for_op}},
      {(p.is("unpermute") || p.is("combine") || p.is("exchange")) && p.out != DType::kNone &&
           p.out != DType::kFP32 && p.out != p.dtype,
       {"out", find_field("out")->codec.write(p), "same or fp32" + for_op}},
      {p.topk > p.groups * p.ranks && (routes || p.topk > 1),
       {"topk", text(p.topk),
        text("at most groups=", p.groups, p.ranks == 1 ? "" : text(" times ranks=", p.ranks))}},
      {(p.rows + p.dropped) % p.topk != 0,
       {"rows", text(p.rows, p.dropped == 0 ? "" : text(" and dropped=", p.dropped)),
        text("a multiple of topk=", p.topk,
             " (rows and dropped choices are topk for each token)")}},
  };
  for (const auto& [is_broken, mistake] : rules) {
    if (is_broken) return mistake;
  }
  return std::nullopt;
}

Problem sensible(Problem problem) {
  if (const auto mistake = find_mistake(problem)) {
    throw bad(problem.where, mistake->key, mistake->found, mistake->needed);
  }
  return problem;
}

Problem parse_problem(const std::string& line, const std::string& where) {
  Problem problem;
  problem.where = where;
  const std::vector<std::string> keys = words_of(fields(), &Field::key);
  std::set<std::string_view> seen;
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw bad(where, word, "no value", "key=value, with one of these keys: " + join(keys, ", "));
    }
    const std::string key = word.substr(0, equals);
    const std::string value = word.substr(equals + 1);
    const Field* field = find_field(key);
    if (field == nullptr) {
      throw bad(where, key, "an unknown key",
                text("one of ", join(keys, ", "), did_you_mean(key, keys)));
    }
    if (!seen.insert(field->key).second) throw bad(where, key, "it twice", "it once");
    if (!field->codec.read(value, problem)) {
      throw bad(where, key, "\"" + value + "\"", field->needed(value));
    }
  }
  if (seen.empty()) throw bad(where, "groups", "an empty line", "groups=N hidden=N ffn=N rows=N");
  if (problem.splits.kind == Splits::Kind::kList && !seen.contains("rows")) {
    const auto& list = problem.splits.list;
    problem.rows = std::accumulate(list.begin(), list.end(), int64_t{0});
    seen.emplace("rows");
  }
  for (const Field& field : fields()) {
    if (field.is_required() && !seen.contains(field.key)) {
      throw bad(where, field.key, "nothing", field.codec.values);
    }
  }
  return problem;
}

std::vector<Problem> parse_problems(std::string_view content, const std::string& file) {
  std::vector<Problem> problems;
  int number = 0;
  for (const std::string& line : split(content, '\n')) {
    ++number;
    const size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos || line[first] == '#') continue;
    problems.push_back(parse_problem(line, text(file, ":", number)));
  }
  if (problems.empty()) {
    throw UsageError(file, ": found no problem, needed at least one line like ",
                     "groups=8 hidden=64 ffn=32 rows=100");
  }
  return problems;
}

std::string to_line(const Problem& problem) {
  const Problem defaults;
  std::string out;
  for (const Field& field : fields()) {
    const std::string value = field.codec.write(problem);
    const bool is_optional = field.presence == Field::Presence::kOptional;
    if (is_optional && value == field.codec.write(defaults)) continue;
    if (!out.empty()) out += ' ';
    out += text(field.key, "=", value);
  }
  return out;
}

}  // namespace moire::tool
