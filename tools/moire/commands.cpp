// What commands share.
#include "commands.h"

#include <algorithm>

#include "problem_source.h"
#include "text.h"

namespace moire::tool {
namespace {

using Settings = std::vector<std::string>;  // KEY=VALUE

// One copy of each list of settings per value of a field, in the place of whatever they say of it;
// the lists as they are if there are no values.
std::vector<Settings> spread(const std::vector<Settings>& lists, const std::string& key,
                             const std::vector<std::string>& values) {
  if (values.empty()) return lists;
  std::vector<Settings> out;
  for (Settings list : lists) {
    std::erase_if(list, [&](const std::string& s) { return s.starts_with(key + "="); });
    for (const std::string& value : values) {
      out.push_back(list);
      out.back().push_back(text(key, "=", value));
    }
  }
  return out;
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

std::vector<Problem> collect_problems(const Options& options) {
  const std::vector<Settings> lists =
      spread(spread({options.settings}, "op", options.ops), "dtype", options.dtypes);
  std::vector<Problem> problems;
  for (const std::string& what : options.problems) {
    for (const Problem& problem : load_problems(what)) {
      for (const Settings& settings : lists) {
        problems.push_back(sensible(with_settings(problem, settings)));
      }
    }
  }
  return problems;
}

}  // namespace moire::tool
