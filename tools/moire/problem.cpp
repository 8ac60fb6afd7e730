// Parsing and printing of problem lines; the fields themselves are in problem_fields.cpp.
#include "problem.h"

#include <algorithm>
#include <numeric>

#include "problem_fields.h"
#include "text.h"

namespace moire::tool {
namespace {

std::string prefix(const Origin& origin) {
  if (origin.file.empty()) return "problem: ";
  return text(origin.file, ":", origin.line, ": ");
}

Status bad(const Origin& origin, std::string_view field, std::string_view found,
           std::string_view needed) {
  return {Code::kInvalidArgument,
          text(prefix(origin), "field \"", field, "\": found ", found, ", needed ", needed)};
}

std::vector<std::string> words(std::string_view line) {
  std::vector<std::string> out;
  std::istringstream in{std::string(line)};
  for (std::string word; in >> word;) out.push_back(word);
  return out;
}

std::vector<std::string> known_keys() {
  std::vector<std::string> keys;
  for (const Field& field : fields()) keys.emplace_back(field.key);
  return keys;
}

// The FP8 ops do not take every scaling and every direction.
Status check_fp8(const Problem& p, const Origin& origin) {
  const bool makes = p.is("quantize") || p.is("quantize_weight");
  const bool reads = p.is("dequantize") || p.is("requantize");
  const std::string op = text("op=", p.op->name);
  if ((reads || p.is("convert_scales")) && p.directions == Directions::kBoth) {
    return bad(origin, "direction", "both", text("rowwise or columnwise for ", op));
  }
  const bool takes_tiles = p.is("quantize_weight") || p.is("dequantize");
  if ((makes || reads) && !takes_tiles && p.scaling == MOIRE_SCALING_FP8_TILE) {
    return bad(origin, "scaling", "fp8_tile", text("mxfp8 or fp8_block for ", op));
  }
  if (p.is("convert_scales") && p.scaling != MOIRE_SCALING_MXFP8) {
    const bool is_tile = p.scaling == MOIRE_SCALING_FP8_TILE;
    return bad(origin, "scaling", is_tile ? "fp8_tile" : "fp8_block", text("mxfp8 for ", op));
  }
  if ((makes || reads) && p.fractional && p.scaling == MOIRE_SCALING_MXFP8) {
    return bad(origin, "fractional", "yes", "no, for scaling=mxfp8");
  }
  return {};
}

// What a recipe, or the formats of a product, have no use for is a mistake.
Status check_formats(const Problem& p, const Origin& origin) {
  const Op& op = *p.op;
  if (!op.multiplies()) {
    if (p.quantization == Quantization::kNone) return {};
    return bad(origin, "dtype", dtype_word(p.a_format()),
               text("fp32, bf16 or fp16 for op=", op.name, ", which has no products"));
  }
  const bool is_product = !op.is_layer();
  const std::string found = text("dtype=", dtype_word(p.a_format()));
  if (op.is_layer() && p.quantization == Quantization::kNone) {
    const std::pair<bool, std::string_view> fields_of_8_bits[] = {
        {p.x != DType::kNone, "x"},
        {p.x_columnwise, "x_columnwise"},
        {p.act_columnwise, "act_columnwise"},
        {p.element != DType::kE4M3, "element"}};
    for (const auto& [is_given, key] : fields_of_8_bits) {
      if (!is_given) continue;
      return bad(origin, key, found, "dtype=mxfp8, mxfp8_fast or fp8_block, which quantise");
    }
  }
  const bool is_mixed = is_product && p.b.has_value();
  const bool has_block = p.quantization == Quantization::kFp8Block ||
                         (is_mixed && p.b->quantization == Quantization::kFp8Block);
  if (p.fractional && !has_block) return bad(origin, "fractional", found, "dtype=fp8_block");
  if (p.emulated && !p.fast && p.quantization != Quantization::kFp8Block) {
    return bad(origin, "emulated", found, "dtype=mxfp8_fast or fp8_block");
  }
  if (p.emulated && is_mixed && p.b->quantization == Quantization::kNone) {
    return bad(origin, "emulated", text("b=", dtype_word(*p.b)), "FP8 operands on both sides");
  }
  return {};
}

// What no field can see alone.
Status check_whole(const Problem& p, const Origin& origin) {
  if (p.layout.block > 0 && p.ffn % p.layout.block != 0) {
    return bad(origin, "layout", text("blocks of ", p.layout.block),
               text("a divisor of ffn=", p.ffn));
  }
  if (p.splits.kind == Splits::Kind::kOneHot && p.splits.group >= p.groups) {
    return bad(origin, "splits", text("one_hot:", p.splits.group),
               text("a group below groups=", p.groups));
  }
  if (p.groups == 0 && p.rows > 0) {
    return bad(origin, "rows", text(p.rows), "0, because groups=0");
  }
  if (p.splits.kind == Splits::Kind::kList) {
    const auto& list = p.splits.list;
    if (static_cast<int64_t>(list.size()) != p.groups) {
      return bad(origin, "splits", text(list.size(), " numbers"), text("groups=", p.groups));
    }
    const int64_t sum = std::accumulate(list.begin(), list.end(), int64_t{0});
    if (sum != p.rows) {
      return bad(origin, "splits", text("a sum of ", sum), text("rows=", p.rows));
    }
  }
  if (Status fp8 = check_fp8(p, origin); !fp8.ok()) return fp8;
  if (Status formats = check_formats(p, origin); !formats.ok()) return formats;
  const bool routes = p.is("router") || p.is("router_backward");
  if (p.topk > p.groups && (routes || p.topk > 1)) {
    return bad(origin, "topk", text(p.topk), text("at most groups=", p.groups));
  }
  if ((p.rows + p.dropped) % p.topk != 0) {
    const std::string dropped = p.dropped == 0 ? "" : text(" and dropped=", p.dropped);
    return bad(
        origin, "rows", text(p.rows, dropped),
        text("a multiple of topk=", p.topk, " (rows and dropped choices are topk for each token)"));
  }
  return {};
}

}  // namespace

Result<Problem> parse_problem(std::string_view line, const Origin& origin) {
  Problem problem;
  std::vector<std::string_view> seen;
  const std::vector<std::string> items = words(line);
  if (items.empty())
    return bad(origin, "groups", "an empty line", "groups=N hidden=N ffn=N rows=N");
  for (const std::string& word : items) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos || equals == 0) {
      return bad(origin, word, "no value",
                 "key=value, with one of these keys: " + join(known_keys(), ", "));
    }
    const std::string key = word.substr(0, equals);
    const std::string value = word.substr(equals + 1);
    const Field* field = find_field(key);
    if (field == nullptr) {
      const std::vector<std::string> keys = known_keys();
      return bad(origin, key, "an unknown key",
                 text("one of ", join(keys, ", "), did_you_mean(key, keys)));
    }
    if (std::find(seen.begin(), seen.end(), field->key) != seen.end()) {
      return bad(origin, key, "it twice", "it once");
    }
    seen.push_back(field->key);
    if (!field->codec.read(value, problem)) {
      return bad(origin, key, "\"" + value + "\"", field->needed(value));
    }
  }
  for (const Field& field : fields()) {
    const bool given = std::find(seen.begin(), seen.end(), field.key) != seen.end();
    const bool derived = field.key == "rows" && problem.splits.kind == Splits::Kind::kList;
    if (!given && derived) {
      const auto& list = problem.splits.list;
      problem.rows = std::accumulate(list.begin(), list.end(), int64_t{0});
    } else if (!given && field.is_required()) {
      return bad(origin, field.key, "nothing", field.codec.values);
    }
  }
  const Status whole = check_whole(problem, origin);
  if (!whole.ok()) return whole;
  return problem;
}

Result<std::vector<Problem>> parse_problems(std::string_view content, const std::string& file) {
  std::vector<Problem> problems;
  int number = 0;
  for (const std::string& line : split(content, '\n')) {
    ++number;
    const size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos || line[first] == '#') continue;
    Result<Problem> problem = parse_problem(line, {file, number});
    if (!problem.ok()) return problem.status();
    problems.push_back(std::move(problem).value());
  }
  if (problems.empty()) {
    return Status(Code::kInvalidArgument,
                  text(file, ": found no problem, needed at least one line like ",
                       "groups=8 hidden=64 ffn=32 rows=100"));
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
