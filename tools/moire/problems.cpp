// moire problems: the shipped problems, and the format that explains itself.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "problem_source.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

using Json = nlohmann::ordered_json;

int print_fields(bool json) {
  if (json) {
    Json out = Json::array();
    for (const FieldHelp& f : problem_fields()) {
      out.push_back({{"key", f.key},
                     {"values", f.values},
                     {"meaning", f.meaning},
                     {"default", f.default_value}});
    }
    std::printf("%s\n", out.dump().c_str());
    return kExitOk;
  }
  std::printf("%s\n\n", wrap("A problem is one line of key=value words, in any order. '#' starts a "
                             "comment line.",
                             0)
                            .c_str());
  for (const FieldHelp& f : problem_fields()) {
    std::string shown = f.default_value.empty() ? "" : text(" [", f.default_value, "]");
    if (f.default_value.empty() && f.key != "name") shown = " (required)";
    if (f.key == "rows") shown = " (required, unless splits is a list)";
    std::printf("%s%s\n%s\n%s\n", paint(Colour::kBold, f.key).c_str(), shown.c_str(),
                wrap("    " + f.meaning, 4).c_str(), wrap("    " + f.values, 4).c_str());
  }
  Table ops({"  op", "entry", "formula"}, std::vector<Table::Align>(3, Table::Align::kLeft));
  for (const Op& op : all_ops()) {
    ops.add({"  " + std::string(op.name), std::string(op.entry()), std::string(op.formula)});
  }
  std::printf("\nThe ops:\n%s", ops.to_string().c_str());
  return kExitOk;
}

}  // namespace

int run_problems(const ProblemsOptions& options) {
  if (options.fields) return print_fields(options.json);
  std::vector<std::string> which = options.which;
  if (which.empty()) {
    for (const ShippedFile& file : kShippedFiles) which.emplace_back(file.name);
  }
  for (const std::string& what : which) {
    ProblemOptions one;
    one.problems = {what};
    const std::vector<Problem> problems = collect_problems(one);
    if (!options.json && options.which.empty()) {
      std::printf("%s\n", paint(Colour::kBold, what).c_str());
    }
    for (const Problem& problem : problems) {
      const std::string line = to_line(problem);
      std::printf("%s\n", options.json ? Json{{"from", what}, {"problem", line}}.dump().c_str()
                                       : wrap_data(line).c_str());
    }
  }
  return kExitOk;
}

}  // namespace moire::tool
