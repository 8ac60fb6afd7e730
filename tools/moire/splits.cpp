// How rows are shared out over groups, by the problem's `splits` field.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "problem.h"
#include "staging/random.h"

namespace moire::tool {
namespace {

using staging::Random;

// `rows` in proportion to `weights`, by largest remainder, so that the sum is exact.
std::vector<int64_t> share_out(int64_t rows, const std::vector<double>& weights) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> splits(weights.size(), 0);
  std::vector<double> remainder(weights.size(), 0);
  int64_t given = 0;
  for (size_t g = 0; g < weights.size(); ++g) {
    const double exact = total > 0 ? static_cast<double>(rows) * weights[g] / total : 0;
    splits[g] = static_cast<int64_t>(std::floor(exact));
    remainder[g] = exact - std::floor(exact);
    given += splits[g];
  }
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater(), [&](size_t g) { return remainder[g]; });
  for (size_t i = 0; given < rows; i = (i + 1) % order.size()) {
    ++splits[order[i]];
    ++given;
  }
  return splits;
}

}  // namespace

std::vector<int64_t> make_splits(const Problem& problem) {
  const auto num_groups = static_cast<size_t>(problem.groups);
  if (num_groups == 0) return {};
  Random random(problem.seed ^ 0x73706C697473ULL);  // apart from the data's stream
  std::vector<double> weights(num_groups, 1.0);
  switch (problem.splits.kind) {
    case Splits::Kind::kList:
      return problem.splits.list;
    case Splits::Kind::kOneHot:
      std::fill(weights.begin(), weights.end(), 0.0);
      weights[static_cast<size_t>(problem.splits.group)] = 1.0;
      break;
    case Splits::Kind::kUniform:
      break;
    case Splits::Kind::kZipf:
      for (size_t g = 0; g < num_groups; ++g) {
        weights[g] = std::pow(static_cast<double>(g + 1), -problem.splits.exponent);
      }
      random.shuffle(weights);
      break;
    case Splits::Kind::kRagged:
      for (double& w : weights) w = random.chance(0.25) ? 0.0 : -std::log(random.uniform());
      weights[static_cast<size_t>(random.below(problem.groups))] += 0.5;
      break;
  }
  return share_out(problem.rows, weights);
}

}  // namespace moire::tool
