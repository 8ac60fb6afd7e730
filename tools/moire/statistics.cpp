#include "statistics.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace moire::tool {
namespace {

constexpr double kOutlierDeviations = 5;
constexpr double kDeviationPerMad = 1.4826;  // of a normal distribution

}  // namespace

Summary summarize(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto at = [&](double fraction) {
    const double place = fraction * static_cast<double>(values.size() - 1);
    const auto below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, values.size() - 1);
    return values[below] + (place - std::floor(place)) * (values[above] - values[below]);
  };
  return {at(0.5), at(0.1), at(0.9), values.front(), values.back()};
}

Summary ratio_span(const std::vector<double>& numerators, const std::vector<double>& denominators) {
  std::vector<double> ratios;
  for (size_t i = 0; i < std::min(numerators.size(), denominators.size()); ++i) {
    ratios.push_back(numerators[i] / denominators[i]);
  }
  return summarize(std::move(ratios));
}

double slope(const std::vector<std::pair<double, double>>& points) {
  double mean_x = 0, mean_y = 0, together = 0, spread = 0;
  for (const auto& [x, y] : points) {
    mean_x += x / static_cast<double>(points.size());
    mean_y += y / static_cast<double>(points.size());
  }
  for (const auto& [x, y] : points) {
    together += (x - mean_x) * (y - mean_y);
    spread += (x - mean_x) * (x - mean_x);
  }
  return together / spread;
}

double outlier_share(const std::vector<double>& values) {
  const double median = summarize(values).median;
  std::vector<double> deviations;
  deviations.reserve(values.size());
  for (const double v : values) deviations.push_back(std::fabs(v - median));
  const double limit = kOutlierDeviations * kDeviationPerMad * summarize(deviations).median;
  const auto beyond = std::ranges::count_if(deviations, [&](double d) { return d > limit; });
  return values.empty() ? 0 : static_cast<double>(beyond) / static_cast<double>(values.size());
}

}  // namespace moire::tool
