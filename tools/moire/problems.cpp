// moire problems: the shipped problems, and the format that explains itself.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "problem_fields.h"
#include "problem_source.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

using Json = nlohmann::ordered_json;

int print_fields(bool json) {
  const Problem defaults;
  if (json) {
    Json out = Json::array();
    for (const Field& f : fields()) {
      out.push_back({{"key", f.key},
                     {"values", f.codec.values},
                     {"meaning", f.meaning},
                     {"default", f.is_required() ? "" : f.codec.write(defaults)}});
    }
    std::printf("%s\n", out.dump().c_str());
    return kExitOk;
  }
  std::printf("%s\n\n", wrap("A problem is one line of key=value words, in any order. '#' starts a "
                             "comment line.",
                             0)
                            .c_str());
  for (const Field& f : fields()) {
    const std::string value = f.codec.write(defaults);
    const std::string shown = f.key == "rows"   ? " (required, unless splits is a list)"
                              : f.is_required() ? " (required)"
                              : value.empty()   ? ""
                                                : text(" [", value, "]");
    std::printf("%s%s\n%s\n%s\n", paint(Colour::kBold, std::string(f.key)).c_str(), shown.c_str(),
                wrap(text("    ", f.meaning), 4).c_str(), wrap("    " + f.codec.values, 4).c_str());
  }
  Table ops({"  op", "entry", "formula"}, std::vector<Table::Align>(3, Table::Align::kLeft));
  for (const Op& op : all_ops()) {
    ops.add({"  " + std::string(op.name), std::string(op.entry()), std::string(op.formula)});
  }
  std::printf("\nThe ops:\n%s", ops.to_string().c_str());
  return kExitOk;
}

}  // namespace

int run_problems(const Options& options) {
  if (options.fields) return print_fields(options.json);
  std::vector<std::string> which = options.problems;
  if (which.empty()) {
    for (const ShippedFile& file : kShippedFiles) which.emplace_back(file.name);
  }
  for (const std::string& what : which) {
    const std::vector<Problem> problems = usage(load_problems(what));
    if (!options.json && options.problems.empty()) {
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
