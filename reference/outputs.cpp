#include "reference/outputs.h"

#include <algorithm>
#include <set>
#include <span>
#include <sstream>

namespace moire::reference {
namespace {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// "" if `got` are k experts by falling score, where scores within their bounds may change places.
std::string judge_choice(const Matrix& scores, int64_t token, std::span<const int64_t> got,
                         std::span<const int64_t> want) {
  std::set<int64_t> seen;
  for (size_t j = 0; j < got.size(); ++j) {
    const std::string where = text("first at token ", token, ", choice ", j, ": got ", got[j]);
    if (got[j] < 0 || got[j] >= scores.columns) return text(where, ", no expert");
    if (!seen.insert(got[j]).second) return text(where, " twice");
    const Number a = scores.at(token, got[j]), b = scores.at(token, want[j]);
    if (a.value < b.value - a.bound - b.bound || a.value > b.value + a.bound + b.bound) {
      return text(where, " with score ", a.value, ", want ", want[j], " with ", b.value);
    }
  }
  return "";
}

}  // namespace

bool all_passed(const std::vector<OutputErrors>& outputs) {
  return std::all_of(outputs.begin(), outputs.end(),
                     [](const OutputErrors& e) { return e.mismatches == 0; });
}

void or_else(std::vector<OutputErrors>& outputs,
             const std::function<std::vector<OutputErrors>()>& judge) {
  if (all_passed(outputs)) return;
  const std::vector<OutputErrors> others = judge();
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].mismatches != 0) outputs[i] = others[i];
  }
}

std::vector<OutputErrors> compare_outputs(const RouterArgs& args, const RouterResults& want) {
  const TensorView idx(args.topk_idx);
  const auto k = static_cast<size_t>(idx.columns());
  std::vector<int64_t> all;
  std::string found;
  for (int64_t t = 0; t < idx.num_rows() && found.empty(); ++t) {
    for (size_t j = 0; j < k; ++j) {
      all.push_back(read_index(idx, t, static_cast<int64_t>(j)));
    }
    const size_t first = static_cast<size_t>(t) * k;
    found = judge_choice(want.choice_scores, t, std::span(all).subspan(first, k),
                         std::span(want.topk_idx).subspan(first, k));
  }
  std::vector<OutputErrors> outputs(1);
  outputs[0].name = "topk_idx";
  outputs[0].mismatches = found.empty() ? 0 : 1;
  outputs[0].first_mismatch = found;
  if (!found.empty()) return outputs;
  outputs.push_back(compare(TensorView(args.topk_weights), router_weights(args, all)));
  outputs.back().name = "topk_weights";
  return outputs;
}

}  // namespace moire::reference
