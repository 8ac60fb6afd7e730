// The chart of a benchmark: for each op a bar as long as its share of the roof, over a thin bar for
// the baseline.
#include <algorithm>
#include <cmath>

#include "bench_result.h"
#include "problem_fields.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int kRowHeight = 26, kLeft = 250, kPlotWidth = 480, kRight = 230, kTop = 78;

std::string escape(const std::string& s) {
  std::string out;
  for (const char c : s) {
    out += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
  }
  return out;
}

int pixels(double share) {
  return static_cast<int>(std::lround(std::clamp(share, 0.0, 1.0) * kPlotWidth));
}

std::string bar(int y, int height, double share, const char* style) {
  return text("<rect x='", kLeft, "' y='", y, "' width='", pixels(share), "' height='", height,
              "' class='", style, "'/>\n");
}

std::string row(const BenchResult& r, const MachineFacts& machine, int y) {
  const std::string label =
      text(r.problem.name, " ", r.problem.op->name, " ", dtype_words(r.problem));
  const double share = r.roof_share(machine);
  std::string out = text("<text x='", kLeft - 8, "' y='", y + 13, "' text-anchor='end'>",
                         escape(label), "</text>\n");
  out += bar(y + 2, 14, share, r.problem.dtype == DType::kFP32 ? "fp32" : "half");
  std::string value = r.flops > 0 ? text(human_number(r.flops_rate() / 1e9), " GFLOP/s")
                                  : text(human_number(r.bytes_rate() / 1e9), " GB/s");
  if (r.ratio.has_value()) {
    out += bar(y + 17, 4, share / r.ratio->median, "baseline");
    value +=
        text(", ", human_number(r.ratio->median), " x baseline", r.is_under_load() ? " *" : "");
  }
  return out + text("<text x='", kLeft + pixels(share) + 6, "' y='", y + 13, "'>", escape(value),
                    "</text>\n");
}

// "moire bench: demo, square on AMD EPYC, 2 threads"
std::string title_of(const std::vector<BenchResult>& results, const MachineFacts& machine) {
  constexpr size_t kMost = 3;  // that a line has room for
  std::vector<std::string> names;
  for (const BenchResult& r : results) {
    const bool is_new = std::find(names.begin(), names.end(), r.problem.name) == names.end();
    if (is_new && !r.problem.name.empty()) names.push_back(r.problem.name);
  }
  if (names.size() > kMost) names = {text(names.size(), " problems")};
  const std::string what = names.empty() ? "" : ": " + join(names, ", ");
  const std::string threads = machine.is_gpu ? "" : text(", ", machine.threads, " threads");
  return escape(text("moire bench", what, " on ", machine.name, threads));
}

std::string roof_text(const MachineFacts& machine) {
  std::string copy = text(human_number(machine.bandwidth / 1e9), " GB/s");
  if (machine.peak_flops <= 0) return copy;
  return text(human_number(machine.peak_flops / 1e9), " GFLOP/s, ", copy);
}

}  // namespace

std::string results_svg(const std::vector<BenchResult>& results, const MachineFacts& machine) {
  std::string rows;
  int y = kTop;
  for (const BenchResult& r : results) {
    if (!r.unsupported.empty()) continue;
    rows += row(r, machine, y);
    y += kRowHeight;
  }
  std::string grid;
  for (int percent = 0; percent <= 100; percent += 25) {
    const int x = kLeft + kPlotWidth * percent / 100;
    grid += text("<line x1='", x, "' y1='", kTop - 6, "' x2='", x, "' y2='", y,
                 "' class='grid'/><text x='", x, "' y='", kTop - 10,
                 "' text-anchor='middle' class='small'>", percent, " %</text>\n");
  }
  const bool is_marked = is_any_under_load(results);
  const int width = kLeft + kPlotWidth + kRight;
  const int height = y + (is_marked ? 28 : 12);
  const std::string title = title_of(results, machine);
  return text(
      "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 ", width, " ", height, "' width='",
      width, "' height='", height, "' role='img'>\n<title>", title, "</title>\n",
      "<style>text{font:12px sans-serif;fill:#222}.title{font:bold 15px sans-serif}"
      ".small{font-size:11px;fill:#666}.grid{stroke:#ddd}.fp32{fill:#3b6fb6}.half{fill:#d9822b}"
      ".baseline{fill:#888}</style>\n",
      "<rect width='100%' height='100%' fill='white'/>\n", "<text x='12' y='22' class='title'>",
      title, "</text>\n", "<text x='12' y='42'>Share of the roof (", roof_text(machine),
      "). Blue: FP32, orange: the other types, thin and grey: the baseline.</text>\n", grid, rows,
      is_marked ? text("<text x='12' y='", y + 16,
                       "' class='small'>* measured while something else took part of the "
                       "machine</text>\n")
                : "",
      "</svg>\n");
}

}  // namespace moire::tool
