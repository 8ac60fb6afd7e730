// The commands: their options, and the functions that run them. Each returns the exit code: 0 done,
// 1 a check failed or nothing could run; UsageError is exit code 2.
#pragma once

#include <moire/context.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "problem.h"

namespace moire::tool {

// What a status says, thrown: as what went wrong, or as bad usage.
inline void require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}
inline void usage(const Status& status) {
  if (!status.ok()) throw UsageError(status.message());
}
template <class T>
T usage(Result<T> result) {
  usage(result.status());
  return std::move(result).value();
}

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;

// Of all commands; main.cpp says which takes what.
struct Options {
  bool json = false;
  std::string device = "cpu";
  int threads = 0;
  std::string implementation;

  std::vector<std::string> problems;  // names, files, lines
  std::vector<std::string> settings;  // key=value, over every problem
  std::vector<std::string> ops;       // instead of the problems' own
  std::vector<std::string> dtypes;

  bool fields = false;  // problems
  int64_t random = 0;   // check
  uint64_t seed = 1;
  bool all_supported = false;
  bool verbose = false;
  double seconds = 1.0;  // bench: of measuring, per variant
  bool sustained = false;
  std::string svg;
  bool advice = false;
};

int run_info(const Options& options);
int run_problems(const Options& options);
int run_explain(const Options& options);
int run_check(const Options& options);
int run_errors(const Options& options);
int run_bench(const Options& options);

// A context as the options ask; UsageError with the library's sentence where there is none. It may
// plan for a GPU that need not be here (--device sm90) where nothing is going to run.
Context open_context(const Options& options, bool may_plan = false);

// The exit code where no problem could be done on the device, once it is said: "nothing was DONE".
int fail_for_nothing(const Options& options, const char* command, const char* done);

using Settings = std::vector<std::string>;  // KEY=VALUE
// What a problem is changed to where neither --ops nor --dtype says it: nothing, if nothing else is
// said.
struct Unasked {
  std::vector<Settings> ops = {{}}, dtypes = {{}};
};
// Every problem that the options name, one for each op asked for in each dtype; UsageError if one
// is bad.
std::vector<Problem> collect_problems(
    const Options& options,
    const std::function<Unasked(const Problem&)>& unasked = [](auto&) { return Unasked(); });

}  // namespace moire::tool
