// What commands share.
#include "commands.h"

#include <algorithm>

#include "problem_source.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

// KEY=VALUE of each value that was asked for; else what is run unasked.
std::vector<Settings> lists_of(const std::string& key, const std::vector<std::string>& values,
                               const std::vector<Settings>& unasked) {
  if (values.empty()) return unasked;
  std::vector<Settings> lists;
  lists.reserve(values.size());
  for (const std::string& value : values) lists.push_back({text(key, "=", value)});
  return lists;
}

// A name that no op has on any device would refuse every call, one after the other.
void check_implementation(const std::string& name) {
  const std::vector<std::string> names = {"cpu", "cuda", "portable", "sm90"};
  if (name.empty() || std::find(names.begin(), names.end(), name) != names.end()) return;
  throw UsageError("--implementation: found \"", name, "\", needed ", list_of(names),
                   did_you_mean(name, names));
}

// "sm90", "sm100": an architecture, whether or not the library knows it.
bool names_architecture(const std::string& device) {
  return device.size() > 2 && device.starts_with("sm") &&
         device.find_first_not_of("0123456789", 2) == std::string::npos;
}

}  // namespace

Context open_context(const Options& options, bool may_plan) {
  ContextOptions wanted;
  if (names_architecture(options.device)) {
    if (!may_plan) {
      throw UsageError("--device: found \"", options.device,
                       "\", needed cpu or cuda: only explain works without the GPU");
    }
    wanted.plan_for = options.device;
  } else if (options.device != "cpu" && options.device != "cuda") {
    const std::string meant = options.device == "gpu" ? "cuda" : options.device;
    throw UsageError("--device: found \"", options.device,
                     "\", needed cpu or cuda, or for explain a GPU to plan for, as sm90",
                     did_you_mean(meant, {"cpu", "cuda"}));
  }
  wanted.device = options.device == "cpu" ? Device::kCpu : Device::kCuda;
  wanted.num_threads = options.threads;
  check_implementation(options.implementation);
  wanted.implementation = options.implementation;
  return usage(Context::create(wanted));
}

int fail_for_nothing(const Options& options, const char* command, const char* done) {
  const std::string& forced = options.implementation;
  print_error(text(command, ": found no problem that ", options.device, " supports",
                   forced.empty() ? "" : text(" with --implementation ", forced),
                   ", so nothing was ", done, "; needed ",
                   forced.empty() ? "" : "no --implementation, or ",
                   options.device == "cpu" ? "--device cuda" : "--device cpu"));
  return kExitFailed;
}

std::vector<Problem> collect_problems(const Options& options,
                                      const std::function<Unasked(const Problem&)>& unasked) {
  std::vector<Problem> problems;
  for (const std::string& what : options.problems) {
    for (const Problem& written : load_problems(what)) {
      const Problem base = with_settings(written, options.settings);
      const Unasked missing = unasked(base);
      for (const Settings& op : lists_of("op", options.ops, missing.ops)) {
        for (const Settings& dtype : lists_of("dtype", options.dtypes, missing.dtypes)) {
          problems.push_back(sensible(with_settings(with_settings(base, dtype), op)));
        }
      }
    }
  }
  return problems;
}

}  // namespace moire::tool
