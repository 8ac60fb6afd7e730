// The command line: what each command takes, and the exit codes. Commands themselves: commands.h.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>

#include "commands.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

const char* const kProblemHelp =
    "a shipped name (qwen3_30b, or cpu:square for one line of it), a file, or a line of key=value "
    "words; moire problems lists them, moire problems --fields explains the format";
constexpr size_t kHelpWidth = 80;  // where nothing says how wide the output is

// Options by their names and what they take; what a default does is in the sentence.
class Help : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    return option->get_type_size() == 0 ? "" : " " + option->get_type_name();
  }
};

// Lines broken where the output ends, under the column of their explanations.
std::string help_of(const CLI::App& app) {
  std::string out;
  for (const std::string& line : split(app.help(), '\n')) {
    const size_t start = line.find_first_not_of(' ');
    const size_t gap = start == std::string::npos ? start : line.find("  ", start);
    const size_t explanation = gap == std::string::npos ? gap : line.find_first_not_of(' ', gap);
    const size_t indent = explanation != std::string::npos ? explanation : start;
    const size_t width = output_width();
    out += wrap(line, indent == std::string::npos ? 0 : indent, width > 0 ? width : kHelpWidth);
    out += "\n";
  }
  out.erase(out.find_last_not_of('\n') + 1);
  return out + "\n";
}

void add_json(CLI::App& command, Options& options) {
  command.add_flag("--json", options.json, "JSON on stdout, one object per line");
}

// A number; the message about a word that is none says what was found and what is needed.
template <class T>
CLI::Option* add_number(
    CLI::App& command, const std::string& name, T& number, const std::string& meaning,
    const char* type = "N",
    const std::string& needed = text("a whole number from 0 to ", std::numeric_limits<T>::max()),
    bool (*accepts)(std::type_identity_t<T>) = [](T n) { return n >= 0; }) {
  const auto check = [=](const std::string& word) -> std::string {
    T found{};
    if (read_number(word, found) && accepts(found)) return "";
    return text("found \"", word, "\", needed ", needed);
  };
  return command.add_option(name, number, meaning)->type_name(type)->check(check);
}

void add_list(CLI::App& command, const std::string& name, std::vector<std::string>& list,
              const std::string& type, const std::string& meaning) {
  CLI::Option* option = command.add_option(name, list, meaning);
  option->type_name(type)->allow_extra_args(false);
  if (type != "KEY=VALUE") option->delimiter(',');
}

// Of what runs problems.
void add_common(CLI::App& command, Options& options, bool needs_problem = true,
                const std::string& devices = "cpu (the default) or cuda") {
  add_json(command, options);
  command.add_option("--device", options.device, devices)->type_name("DEVICE");
  add_number(command, "--threads", options.threads, "CPU threads; one per core by default", "N",
             "a whole number from 0 to 4096", [](int n) { return n >= 0 && n <= 4096; });
  command
      .add_option("--implementation", options.implementation,
                  "force this implementation by name (see moire info)")
      ->type_name("NAME");
  command.add_option("PROBLEM", options.problems, kProblemHelp)
      ->type_name("")
      ->required(needs_problem);
  add_list(command, "--set", options.settings, "KEY=VALUE",
           "a field of every PROBLEM; may be repeated");
  add_list(command, "--ops", options.ops, "OPS",
           "run these ops of the problem's shape, as fc1,fc2,mlp");
  add_list(command, "--dtype", options.dtypes, "TYPES", "run in these element types, as fp32,bf16");
}

void add_check(CLI::App& command, Options& options) {
  add_common(command, options, false);
  auto* random =
      add_number(command, "--random", options.random, "this many random ragged problems as well");
  add_number(command, "--seed", options.seed, "of the random problems; 1 by default")
      ->needs(random);
  command.add_flag("--all-supported", options.all_supported,
                   "fail on what is unsupported as well, as with a forced implementation");
  command.add_flag("--verbose", options.verbose, "every output of every problem");
}

void add_bench(CLI::App& command, Options& options) {
  add_common(command, options);
  auto* time = add_number(command, "--time", options.seconds,
                          "seconds of measuring, per op and dtype; 1 by default", "SECONDS",
                          "a positive number of seconds",
                          [](double n) { return n > 0 && std::isfinite(n); });
  auto* svg = command.add_option("--svg", options.svg, "write a chart to this file");
  svg->type_name("FILE");
  command
      .add_flag("--sustained", options.sustained,
                "on a GPU: in steady state, with clock, power and energy")
      ->excludes(time)
      ->excludes(svg);
  command.add_flag("--advice", options.advice,
                   "say how it was measured, and of each warning what to do about it");
}

struct Command {
  const char* name;
  const char* description;
  int (*run)(const Options&);
  void (*add)(CLI::App& command, Options& options);
  const char* footer;
};

const Command kCommands[] = {
    {"info", "Build, devices, and what each op has on each", run_info, add_json,
     "Examples:\n"
     "  moire info             what was built and which devices there are\n"
     "  moire info --json      the same as JSON"},
    {"problems", "The shipped problems, and their format", run_problems,
     [](CLI::App& command, Options& options) {
       command.add_option("PROBLEM", options.problems, kProblemHelp)->type_name("");
       command.add_flag("--fields", options.fields, "every field: meaning, values, default");
       add_json(command, options);
     },
     "Examples:\n"
     "  moire problems                 every shipped line\n"
     "  moire problems cpu             the lines of one name\n"
     "  moire problems --fields        how to write one"},
    {"explain", "What a problem would run, and why nothing faster; runs nothing", run_explain,
     [](CLI::App& command, Options& options) {
       add_common(command, options, true,
                  "cpu (the default), cuda, or a GPU that need not be here: sm80, sm86, sm89, "
                  "sm90, sm100 or sm120");
     },
     "A GPU that need not be here is that of its compute capability, as sm90 for Hopper (H100, "
     "H200); no driver is asked, but moire has to be built with CUDA.\n\n"
     "Examples:\n"
     "  moire explain qwen3_30b                        every step of the layer\n"
     "  moire explain qwen3_30b --device sm90          on Hopper, from any machine\n"
     "  moire explain deepseek_v3 --dtype fp32 --json  as JSON\n"
     "  moire explain \"op=fc1 groups=8 hidden=64 ffn=32 rows=100\""},
    {"check", "Problems against the scalar reference", run_check, add_check,
     "Errors are in units of the bound that theory gives each element: 1 is the largest that "
     "passes. A failing problem is printed as a line; moire check \"LINE\" runs exactly it.\n\n"
     "Examples:\n"
     "  moire check tiny tails                  every option, every awkward size\n"
     "  moire check --random 2000 --seed 7      random problems over all ops\n"
     "  moire check --random 500 --ops fc1,mlp --dtype bf16\n"
     "  moire check qwen3_30b --set rows=64 --set groups=8\n"
     "  moire check fast_paths --all-supported  nothing may be left out\n"
     "  moire check tiny --json                 a line per problem, then the totals"},
    {"errors", "How far each recipe's MLP, forward and backward, is from the exact function",
     run_errors, [](CLI::App& command, Options& options) { add_common(command, options); },
     "Relative root mean square errors against double precision without any rounding, on the "
     "problem's shape, as a Markdown table. The reference is scalar: small shapes.\n\n"
     "Examples:\n"
     "  moire errors \"groups=8 hidden=256 ffn=512 rows=512 splits=zipf:1\"\n"
     "  moire errors cpu:demo --json"},
    {"bench", "Times beside a baseline measured in the same run", run_bench, add_bench,
     "Without --ops a layer is timed as its products, its forward, and forward + backward; "
     "without --dtype in fp32 and its own dtype (bf16 where that is fp32). Ratios are baseline "
     "time / our time: above 1 is faster. A * marks those measured while something else took part "
     "of the machine.\n\n"
     "Examples:\n"
     "  moire bench cpu                         the standard CPU table\n"
     "  moire bench cpu:square --ops fc1 --dtype fp32 --time 3\n"
     "  moire bench cpu:demo --ops glu,convert_glu,permute,unpermute\n"
     "  moire bench cpu --advice                how it was measured, what to mend\n"
     "  moire bench cpu --json > results.jsonl  all samples, protocol, machine\n"
     "  moire bench cpu --svg chart.svg         a chart as well\n"
     "  moire bench gpu:qwen3_30b --device cuda --sustained --ops fc1,mlp"},
};

// The command goes before its options, as the parser wants it; options alone are left to that.
void put_command_first(std::vector<std::string>& words) {
  const std::vector<std::string> names = words_of(kCommands, &Command::name);
  const std::string& first = words.front();
  const auto command = std::find_first_of(words.begin(), words.end(), names.begin(), names.end());
  if (command == words.begin() || first.empty() || first == "--version") return;
  if (!first.starts_with("-"))
    throw UsageError("found command \"", first, "\", needed one of ", join(names, ", "),
                     did_you_mean(first, names));
  if (command != words.end()) std::rotate(words.begin(), command, command + 1);
}

// What is wrong with the words, as a sentence.
std::string sentence(const CLI::App& app, const CLI::ParseError& error) {
  const auto chosen = app.get_subcommands();
  const CLI::App& command = chosen.empty() ? app : *chosen.front();
  const std::string prefix = chosen.empty() ? "" : command.get_name() + ": ";
  const std::string help = text("moire ", chosen.empty() ? "" : command.get_name() + " ", "--help");
  std::string what = error.what();
  const std::vector<std::string> unknown = command.remaining();
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !unknown.empty()) {
    std::vector<std::string> known;
    for (const CLI::Option* option : command.get_options()) {
      for (const std::string& word : option->get_lnames()) known.push_back("--" + word);
    }
    what = text("not expected: ", unknown.front(), did_you_mean(unknown.front(), known));
  }
  return text(prefix, what, what.ends_with("?") ? "" : text("; see ", help));
}

int parse_and_run(int argc, char** argv) {
  CLI::App app("moire: the grouped MLP of mixture-of-experts models, on the command line", "moire");
  app.formatter(std::make_shared<Help>());
  app.set_version_flag("--version", std::string("moire ") + MOIRE_TOOL_VERSION,
                       "Print the version and exit");
  app.require_subcommand(0, 1);  // see put_command_first
  app.footer(
      "Examples:\n"
      "  moire info                             what there is\n"
      "  moire explain qwen3_30b --device sm90  what would run, and why nothing faster\n"
      "  moire check tiny                       whether results are right\n"
      "  moire bench cpu                        how fast\n"
      "  moire COMMAND --help                   more of each\n\n"
      "Exit codes: 0 done, 1 a check failed or nothing could run, 2 bad usage or a bad problem.\n"
      "Data goes to stdout, progress and errors to stderr.");
  Options options;
  std::function<int()> run;
  for (const Command& c : kCommands) {
    CLI::App* command = app.add_subcommand(c.name, c.description);
    c.add(*command, options);
    command->footer(c.footer);
    command->callback([&] { run = [&] { return c.run(options); }; });
  }
  std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty()) words = {"--help"};
  if (words.front() == "help") words.front() = "--help";  // moire help [COMMAND]
  put_command_first(words);
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // it takes the last first
  } catch (const CLI::CallForHelp&) {
    std::fputs(help_of(app).c_str(), stdout);
    return kExitOk;
  } catch (const CLI::CallForVersion& version) {
    std::printf("%s\n", version.what());
    return kExitOk;
  } catch (const CLI::ParseError& error) {
    throw UsageError(sentence(app, error));
  }
  if (!run) throw UsageError("needed a command; see moire --help");
  return run();
}

}  // namespace
}  // namespace moire::tool

int main(int argc, char** argv) {
  try {
    const int code = moire::tool::parse_and_run(argc, argv);
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    throw std::runtime_error("stdout could not be written to its end");
  } catch (const moire::tool::UsageError& error) {
    moire::tool::print_error(error.what());
    return moire::tool::kExitUsage;
  } catch (const std::bad_alloc&) {
    moire::tool::print_error(
        "found a problem past this machine's memory, needed a smaller one: --set rows=64 --set "
        "groups=8");
    return moire::tool::kExitUsage;
  } catch (const std::exception& error) {
    moire::tool::print_error(error.what());
    return moire::tool::kExitFailed;
  }
}
