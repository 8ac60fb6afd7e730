// moire problems: the shipped problems, and the format that explains itself.
#include <cstdio>

#include "commands.h"
#include "problem_fields.h"
#include "problem_source.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

int print_fields(bool json) {
  const Problem defaults;
  if (json) {
    for (const Field& f : fields()) {
      print_json({{"key", f.key},
                  {"values", f.codec.values},
                  {"meaning", f.meaning},
                  {"default", f.is_required() ? "" : f.codec.write(defaults)}});
    }
    return kExitOk;
  }
  print_line(0,
             "A problem is one line of key=value words, in any order. '#' starts a comment line.");
  std::printf("\n");
  for (const Field& f : fields()) {
    const std::string value = f.codec.write(defaults);
    const std::string shown = f.key == "rows"   ? " (required, unless splits is a list)"
                              : f.is_required() ? " (required)"
                              : value.empty()   ? ""
                                                : text(" [", value, "]");
    std::printf("%s%s\n", paint(Colour::kBold, std::string(f.key)).c_str(), shown.c_str());
    print_line(4, "    ", f.meaning);
    print_line(4, "    ", f.codec.values);
  }
  Table ops({"  op", "entry", "formula"});
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
  if (which.empty()) which = words_of(kShippedFiles, &ShippedFile::name);
  for (const std::string& what : which) {
    const std::vector<Problem> problems = load_problems(what);
    if (!options.json && options.problems.empty()) {
      std::printf("%s\n", paint(Colour::kBold, what).c_str());
    }
    for (const Problem& problem : problems) {
      const std::string line = to_line(sensible(problem));
      options.json ? print_json({{"from", what}, {"problem", line}})
                   : static_cast<void>(std::printf("%s\n", wrap_data(line).c_str()));
    }
  }
  return kExitOk;
}

}  // namespace moire::tool
