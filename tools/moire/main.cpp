// The command line: what each command takes, and the exit codes. Commands themselves: commands.h.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>
#include <new>

#include "commands.h"
#include "text.h"

namespace moire::tool {
namespace {

const char* const kProblemHelp =
    "a shipped name (qwen3_30b, or cpu:square for one line of it), a file, or a line of key=value "
    "words; `moire problems` lists them, `moire problems --fields` explains the format";

// A validator whose message says what was found and what is needed.
template <class T, class Accepts>
CLI::Validator number(const std::string& needed, Accepts accepts) {
  const auto check = [=](const std::string& word) -> std::string {
    T value{};
    const char* const end = word.data() + word.size();
    const auto [stop, error] = std::from_chars(word.data(), end, value);
    if (error == std::errc() && stop == end && accepts(value)) return "";
    return text("found \"", word, "\", needed ", needed);
  };
  return {check, "NUMBER"};
}

template <class T>
CLI::Validator whole_number() {
  return number<T>("a whole number from 0", [](T value) { return value >= 0; });
}

void add_common(CLI::App& command, CommonOptions& options) {
  command.add_flag("--json", options.json, "JSON on stdout, one object per line");
  command.add_option("--device", options.device, "cpu or cuda")->capture_default_str();
  command.add_option("--threads", options.threads, "CPU threads; 0 = one per core")
      ->check(number<int>("a whole number from 0 to 4096",
                          [](int value) { return value >= 0 && value <= 4096; }))
      ->capture_default_str();
  command.add_option("--implementation", options.implementation,
                     "force this implementation by name (see `moire info`)");
}

void add_problems(CLI::App& command, ProblemOptions& options, bool required) {
  auto* problems = command.add_option("PROBLEM", options.problems, kProblemHelp);
  problems->required(required);
  command.add_option("--set", options.settings, "KEY=VALUE, over every problem; may be repeated")
      ->allow_extra_args(false);
  command.add_option("--ops", options.ops, "run these ops of the problem's shape, as fc1,fc2,mlp")
      ->delimiter(',')
      ->allow_extra_args(false);
  command.add_option("--dtype", options.dtypes, "run in these element types, as fp32,bf16")
      ->delimiter(',')
      ->allow_extra_args(false);
}

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

void add_explain(CLI::App& app, ExplainOptions& options, std::function<int()>& run) {
  CLI::App* command = app.add_subcommand(
      "explain", "What a problem would run, and why nothing faster; runs nothing");
  add_common(*command, options.common);
  add_problems(*command, options.problems, true);
  command->footer(
      "Examples:\n"
      "  moire explain qwen3_30b                          every step of the layer\n"
      "  moire explain deepseek_v3 --dtype fp32 --json    the same as JSON\n"
      "  moire explain \"op=fc1 groups=8 hidden=64 ffn=32 rows=100\"");
  command->callback([&] { run = [&] { return run_explain(options); }; });
}

void add_check(CLI::App& app, CheckOptions& options, std::function<int()>& run) {
  CLI::App* command = app.add_subcommand("check", "Problems against the scalar reference");
  add_common(*command, options.common);
  add_problems(*command, options.problems, false);
  command->add_option("--random", options.random, "this many random ragged problems as well")
      ->check(whole_number<int64_t>());
  command->add_option("--seed", options.seed, "of the random problems")
      ->check(whole_number<uint64_t>())
      ->capture_default_str();
  command->add_flag("--all-supported", options.all_supported,
                    "fail on what is unsupported as well, as with a forced implementation");
  command->add_flag("--verbose", options.verbose, "every output of every problem");
  command->footer(
      "Errors are in units of the bound that theory gives each element: 1 is the largest that\n"
      "passes. A failing problem is printed as a line; `moire check \"LINE\"` runs exactly it.\n\n"
      "Examples:\n"
      "  moire check tiny tails                          every option, every awkward size\n"
      "  moire check --random 2000 --seed 7              random problems over all ops\n"
      "  moire check --random 500 --ops fc1,mlp --dtype bf16\n"
      "  moire check qwen3_30b --set rows=64 --set groups=8\n"
      "  moire check fast_paths --all-supported          nothing may be left out");
  command->callback([&] { run = [&] { return run_check(options); }; });
}

void add_errors(CLI::App& app, ErrorsOptions& options, std::function<int()>& run) {
  CLI::App* command = app.add_subcommand(
      "errors", "How far each recipe's MLP, forward and backward, is from the exact function");
  add_common(*command, options.common);
  add_problems(*command, options.problems, true);
  command->footer(
      "Relative root mean square errors against double precision without any rounding, on the\n"
      "problem's shape, as a Markdown table. The reference is scalar: small shapes.\n\n"
      "Examples:\n"
      "  moire errors \"groups=8 hidden=256 ffn=512 rows=512 splits=zipf:1\"\n"
      "  moire errors cpu:demo --json");
  command->callback([&] { run = [&] { return run_errors(options); }; });
}

void add_bench(CLI::App& app, BenchOptions& options, std::function<int()>& run) {
  CLI::App* command =
      app.add_subcommand("bench", "Times beside a baseline measured in the same run");
  add_common(*command, options.common);
  add_problems(*command, options.problems, true);
  auto* time =
      command->add_option("--time", options.seconds, "seconds of measuring, per op and dtype");
  time->check(number<double>("a positive number of seconds",
                             [](double value) { return value > 0 && std::isfinite(value); }))
      ->capture_default_str();
  auto* svg = command->add_option("--svg", options.svg, "write a chart to this file");
  command
      ->add_flag("--sustained", options.sustained,
                 "on a GPU: in steady state, with clock, power and energy")
      ->excludes(time)
      ->excludes(svg);
  command->footer(
      "Without --ops a layer is timed as its products, its forward, and forward + backward; "
      "without\n"
      "--dtype in fp32 and bf16. Ratios are baseline time / our time, above 1 is faster.\n\n"
      "Examples:\n"
      "  moire bench cpu                                    the standard CPU table\n"
      "  moire bench cpu:square --ops fc1 --dtype fp32 --time 3\n"
      "  moire bench cpu:demo --ops glu,convert_glu,permute,unpermute\n"
      "  moire bench cpu --json > results.jsonl             all samples, protocol, machine\n"
      "  moire bench cpu --svg chart.svg\n"
      "  moire bench gpu:qwen3_30b --device cuda --sustained --ops fc1,mlp");
  command->callback([&] { run = [&] { return run_bench(options); }; });
}

// A command has to come first; options alone (--help, --version) are left to the parser.
void require_command(CLI::App& app, int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (first.starts_with("-")) return;
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  if (std::find(names.begin(), names.end(), first) != names.end()) return;
  throw UsageError(text("found ", argc > 1 ? text("command \"", first, "\"") : "no command",
                        ", needed one of ", join(names, ", "), "; see moire --help"));
}

int parse_and_run(int argc, char** argv) {
  CLI::App app("moire: the grouped MLP of mixture-of-experts models, on the command line", "moire");
  app.set_version_flag("--version", std::string("moire ") + MOIRE_TOOL_VERSION);
  app.require_subcommand(0, 1);  // see require_command
  app.footer(
      "Exit codes: 0 done, 1 a check failed, 2 bad usage or a bad problem.\n"
      "Data goes to stdout, progress and errors to stderr. `moire COMMAND --help` has examples.");
  InfoOptions info;
  ProblemsOptions problems;
  ExplainOptions explain;
  CheckOptions check;
  ErrorsOptions errors;
  BenchOptions bench;
  std::function<int()> run;
  add_info(app, info, run);
  add_problem_list(app, problems, run);
  add_explain(app, explain, run);
  add_check(app, check, run);
  add_errors(app, errors, run);
  add_bench(app, bench, run);
  require_command(app, argc, argv);
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
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr,
                 "moire: found a problem past this machine's memory, needed a smaller one: --set "
                 "rows=64 --set groups=8\n");
    return moire::tool::kExitUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moire: %s\n", error.what());
    return moire::tool::kExitFailed;
  }
}
