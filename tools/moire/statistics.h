// The statistics of a benchmark; those of scripts/results.py, and tests/tools/statistics.json holds
// both to one table.
#pragma once

#include <utility>
#include <vector>

namespace moire::tool {

struct Summary {
  double median = 0, p10 = 0, p90 = 0, least = 0, most = 0;
};
// Percentiles are linear between the two values around them.
Summary summarize(std::vector<double> values);

// Of the ratios, turn by turn.
Summary ratio_span(const std::vector<double>& numerators, const std::vector<double>& denominators);

// Of the straight line of least squares through (x, y).
double slope(const std::vector<std::pair<double, double>>& points);

// Share of samples further from the median than 5 standard deviations, estimated by the median
// absolute deviation (Iglewicz and Hoaglin 1993 take 3.5; timings have a long tail).
double outlier_share(const std::vector<double>& values);

}  // namespace moire::tool
