#include "outputs.h"

#include <set>
#include <span>

#include "text.h"

namespace moire::tool {
namespace {

using reference::Number;

// "" if `got` are k experts by falling score, where scores within their bounds may change places.
std::string judge_choice(const reference::Matrix& scores, int64_t token,
                         std::span<const int64_t> got, std::span<const int64_t> want) {
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

void compare(Comparison& c, const OpCall&, const RouterArgs& args,
             const reference::RouterResults& want) {
  const TensorView idx(args.topk_idx);
  const auto k = static_cast<size_t>(idx.columns());
  std::vector<int64_t> all;
  std::string found;
  for (int64_t t = 0; t < idx.num_rows() && found.empty(); ++t) {
    for (size_t j = 0; j < k; ++j) {
      all.push_back(reference::read_index(idx, t, static_cast<int64_t>(j)));
    }
    const size_t first = static_cast<size_t>(t) * k;
    found = judge_choice(want.choice_scores, t, std::span(all).subspan(first, k),
                         std::span(want.topk_idx).subspan(first, k));
  }
  c.finding("topk_idx", found);
  if (!found.empty()) return;
  c.add("topk_weights", args.topk_weights, reference::router_weights(args, all),
        Comparison::Rows::kOther);
}

}  // namespace moire::tool
