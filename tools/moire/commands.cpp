// What commands share.
#include "commands.h"

#include <set>

#include "problem_source.h"
#include "text.h"

namespace moire::tool {
namespace {

// One copy of each problem per value of a field; the problems as they are if there are no values.
std::vector<Problem> spread(const std::vector<Problem>& problems, const std::string& key,
                            const std::vector<std::string>& values) {
  if (values.empty()) return problems;
  std::vector<Problem> out;
  for (const Problem& problem : problems) {
    for (const std::string& value : values) {
      out.push_back(usage(with_settings(problem, {text(key, "=", value)})));
    }
  }
  return out;
}

// A name that no op has on any device would refuse every call, one after the other.
void check_implementation(const CommonOptions& options) {
  const std::set<std::string> names = {"", "cpu", "portable", "sm90"};
  if (names.contains(options.implementation)) return;
  throw UsageError(text("--implementation: found \"", options.implementation,
                        "\", needed cpu, portable or sm90"));
}

}  // namespace

Context open_context(const CommonOptions& options) {
  ContextOptions wanted;
  if (options.device != "cpu" && options.device != "cuda") {
    throw UsageError(text("--device: found \"", options.device, "\", needed cpu or cuda"));
  }
  wanted.device = options.device == "cuda" ? Device::kCuda : Device::kCpu;
  wanted.num_threads = options.threads;
  check_implementation(options);
  wanted.implementation = options.implementation;
  return usage(Context::create(wanted));
}

std::vector<Problem> collect_problems(const ProblemOptions& options) {
  std::vector<Problem> problems;
  for (const std::string& what : options.problems) {
    for (const Problem& problem : usage(load_problems(what))) {
      problems.push_back(
          options.settings.empty() ? problem : usage(with_settings(problem, options.settings)));
    }
  }
  return spread(spread(problems, "op", options.ops), "dtype", options.dtypes);
}

}  // namespace moire::tool
