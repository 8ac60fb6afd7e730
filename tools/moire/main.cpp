// The command line: what each command takes, and the exit codes. Commands themselves: commands.h.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <functional>

#include "commands.h"

namespace moire::tool {
namespace {

const char* const kProblemHelp =
    "a shipped name (qwen3_30b, or cpu:square for one line of it), a file, or a line of key=value "
    "words; `moire problems` lists them, `moire problems --fields` explains the format";

void add_info(CLI::App& app, InfoOptions& options, std::function<int()>& run) {
  CLI::App* command = app.add_subcommand("info", "Build, devices, and what each op has on each");
  command->add_flag("--json", options.common.json, "JSON on stdout");
  command->footer("Example: moire info --json");
  command->callback([&] { run = [&] { return run_info(options); }; });
}

void add_problem_list(CLI::App& app, ProblemsOptions& options, std::function<int()>& run) {
  CLI::App* command = app.add_subcommand("problems", "The shipped problems, and their format");
  command->add_option("PROBLEM", options.which, kProblemHelp);
  command->add_flag("--fields", options.fields, "every field: meaning, values, default");
  command->add_flag("--json", options.json, "JSON on stdout, one object per line");
  command->footer(
      "Examples:\n"
      "  moire problems                 every shipped line\n"
      "  moire problems cpu             the lines of one name\n"
      "  moire problems --fields        how to write one");
  command->callback([&] { run = [&] { return run_problems(options); }; });
}

int parse_and_run(int argc, char** argv) {
  CLI::App app("moire: the grouped MLP of mixture-of-experts models, on the command line", "moire");
  app.set_version_flag("--version", std::string("moire ") + MOIRE_VERSION_STRING);
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done, 1 a check failed, 2 bad usage or a bad problem.\n"
      "Data goes to stdout, progress and errors to stderr. `moire COMMAND --help` has examples.");
  InfoOptions info;
  ProblemsOptions problems;
  std::function<int()> run;
  add_info(app, info, run);
  add_problem_list(app, problems, run);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  return run();
}

}  // namespace
}  // namespace moire::tool

int main(int argc, char** argv) {
  try {
    return moire::tool::parse_and_run(argc, argv);
  } catch (const moire::tool::UsageError& error) {
    std::fprintf(stderr, "moire: %s\n", error.what());
    return moire::tool::kExitUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moire: %s\n", error.what());
    return moire::tool::kExitFailed;
  }
}
