// moire check: problems against the reference, shipped ones or random ones by the thousand.
#include <cstdio>
#include <map>
#include <tuple>

#include "case_runner.h"
#include "commands.h"
#include "problem_fields.h"
#include "problem_source.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

// A reference that computes in scalars gets through about this many products a second.
constexpr double kReferenceRate = 1e8;
constexpr double kPatience = 60;

struct Totals {
  int64_t passed = 0, failed = 0, unsupported = 0;
  double max_error = 0, rms_error = 0;
  std::map<std::string, int64_t> unsupported_reasons;
};

struct Shown {
  const char* word;
  Colour colour;
};
Shown shown(Verdict::Kind kind) {
  if (kind == Verdict::Kind::kUnsupported) return {"unsupported", Colour::kYellow};
  const bool has_passed = kind == Verdict::Kind::kPassed;
  return has_passed ? Shown{"passed", Colour::kGreen} : Shown{"failed", Colour::kRed};
}

Json to_json(const Problem& problem, const Verdict& verdict) {
  Json out = {{"problem", to_line(problem)},
              {"result", shown(verdict.kind).word},
              {"max_error", verdict.max_error},
              {"rms_error", verdict.rms_error},
              {"calls", Json::array()}};
  if (!verdict.reason.empty()) out["reason"] = verdict.reason;
  for (const CallVerdict& call : verdict.calls) {
    Json outputs = Json::array();
    for (const OutputErrors& e : call.outputs) {
      outputs.push_back({{"name", e.name},
                         {"elements", e.elements},
                         {"mismatches", e.mismatches},
                         {"max_error", e.max_error},
                         {"rms_error", e.rms_error},
                         {"first_mismatch", e.first_mismatch}});
    }
    out["calls"].push_back({{"call", call.entry}, {"outputs", outputs}});
  }
  return out;
}

void print_failures(const Verdict& verdict) {
  if (!verdict.reason.empty()) print_line(6, "    ", verdict.reason);
  for (const CallVerdict& call : verdict.calls) {
    for (const OutputErrors& e : call.outputs) {
      if (e.mismatches == 0) continue;
      print_line(6, "    ", call.entry, ": ", e.name, ": ", e.mismatches, " of ", e.elements,
                 " elements wrong, ", e.first_mismatch);
    }
  }
}

void print(const Problem& problem, const Verdict& verdict) {
  const auto [word, colour] = shown(verdict.kind);
  std::string line = paint(colour, word);
  if (verdict.kind == Verdict::Kind::kPassed) {
    line += printed(" (max %.3f, rms %.3f of the bound)", verdict.max_error, verdict.rms_error);
  }
  line += text("  ", to_line(problem));
  std::printf("%s\n", wrap_data(line).c_str());
  print_failures(verdict);
}

void print_outputs(const Verdict& verdict) {
  for (const CallVerdict& call : verdict.calls) {
    for (const OutputErrors& e : call.outputs) {
      std::printf("    %-22s %-14s %9lld elements  max %.3f  rms %.3f\n", call.entry.c_str(),
                  e.name.c_str(), static_cast<long long>(e.elements), e.max_error, e.rms_error);
    }
  }
}

void count(const Verdict& verdict, Totals& totals) {
  if (verdict.kind == Verdict::Kind::kUnsupported) {
    ++totals.unsupported;
    ++totals.unsupported_reasons[verdict.reason];
    return;
  }
  ++(verdict.kind == Verdict::Kind::kPassed ? totals.passed : totals.failed);
  totals.max_error = std::max(totals.max_error, verdict.max_error);
  totals.rms_error = std::max(totals.rms_error, verdict.rms_error);
}

void print(const Totals& totals) {
  const auto count = [](int64_t number, const char* word, Colour colour) {
    return paint(number > 0 ? colour : Colour::kNone, text(number, " ", word));
  };
  print_line(2, count(totals.passed, "passed", Colour::kGreen), ", ",
             count(totals.failed, "failed", Colour::kRed), ", ",
             count(totals.unsupported, "unsupported", Colour::kYellow),
             printed("; largest error %.3f, largest rms %.3f of the bound", totals.max_error,
                     totals.rms_error));
  for (const auto& [reason, times] : totals.unsupported_reasons) {
    print_line(4, "  ", times, " x ", reason);
  }
}

void warn_if_slow(const Problem& p) {
  const double products = 9.0 * static_cast<double>(p.rows) * static_cast<double>(p.hidden) *
                          static_cast<double>(p.ffn);
  const double seconds = products / kReferenceRate;
  if (seconds < kPatience) return;
  print_error(text("the scalar reference needs about ", human_seconds(seconds), " for ",
                   p.name.empty() ? "this" : p.name,
                   "; --set rows=64 --set groups=8 makes it smaller"));
}

// What random problems draw from: where there are options, their values.
Choices choices_of(const Options& options) {
  Choices out;
  for (const auto& [key, option, values] :
       {std::tuple("op", "--ops", options.ops), std::tuple("dtype", "--dtype", options.dtypes)}) {
    for (const std::string& value : values) {
      Problem unused;
      const Field* const field = find_field(key);
      if (!field->codec.read(value, unused)) {
        throw UsageError(option, ": found \"", value, "\", needed ", field->needed(value));
      }
      out[key].push_back(value);
    }
  }
  return out;
}

}  // namespace

int run_check(const Options& options) {
  const Context context = open_context(options);
  const std::vector<Problem> named = collect_problems(options);
  if (named.empty() && options.random == 0) {
    throw UsageError("check: found no problem, needed PROBLEM or --random N");
  }
  if (named.empty() && !options.settings.empty()) {
    throw UsageError(
        "check: found --set beside --random alone, needed PROBLEM: random problems "
        "draw their fields, all but --ops and --dtype");
  }
  for (const Problem& p : named) require_memory_for(context, p);
  const Choices choices = choices_of(options);
  const auto num_named = static_cast<int64_t>(named.size());
  Totals totals;
  {
    Progress progress("check", num_named + options.random);
    for (int64_t i = 0; i < num_named + options.random; ++i) {
      const bool is_named = i < num_named;
      const Problem problem = is_named ? named[static_cast<size_t>(i)]
                                       : random_problem(options.seed, i - num_named, choices);
      if (is_named) warn_if_slow(problem);
      progress.show(i, std::string(problem.op->name));
      const Verdict verdict = judge(context, problem);
      count(verdict, totals);
      const bool is_news = is_named || options.verbose || verdict.kind == Verdict::Kind::kFailed;
      if (!is_news) continue;
      progress.clear();
      if (options.json) {
        print_json(to_json(problem, verdict));
        continue;
      }
      print(problem, verdict);
      if (options.verbose) print_outputs(verdict);
      std::fflush(stdout);
    }
  }
  if (options.json) {
    print_json({{"passed", totals.passed},
                {"failed", totals.failed},
                {"unsupported", totals.unsupported},
                {"unsupported_reasons", totals.unsupported_reasons},
                {"max_error", totals.max_error},
                {"rms_error", totals.rms_error},
                {"random", options.random},
                {"seed", options.seed}});
  } else {
    print(totals);
  }
  const bool has_nothing = totals.passed + totals.failed == 0;
  if (has_nothing) return fail_for_nothing(options, "check", "checked");
  const bool is_short = options.all_supported && totals.unsupported > 0;
  return totals.failed > 0 || is_short ? kExitFailed : kExitOk;
}

}  // namespace moire::tool
