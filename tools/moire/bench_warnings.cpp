#include "bench_warnings.h"

namespace moire::tool {
namespace {

struct Entry {
  Warning::Kind kind;
  const char* code;
  const char* remedy;
};

constexpr Entry kEntries[] = {
    {Warning::Kind::kOtherLoad, "other_load", "stop other programs, or compare ratios only"},
    {Warning::Kind::kStolenTime, "stolen_time",
     "use a machine of your own, or compare ratios only"},
    {Warning::Kind::kClockMoved, "clock_moved",
     "fix the clock (cpupower frequency-set), or compare ratios only"},
    {Warning::Kind::kOutliers, "outliers", "run longer: --time 5"},
    {Warning::Kind::kSpread, "spread", "run longer (--time 5) on an idle machine"},
    {Warning::Kind::kFewRounds, "few_rounds", "run longer: --time 5"},
    {Warning::Kind::kInCache, "in_cache", "choose a larger problem, or free memory for more sets"},
    {Warning::Kind::kNoBaseline, "no_baseline",
     "install libopenblas-dev, run cmake again and build"},
    {Warning::Kind::kNoCuBlas, "no_baseline", "put the folder of libcublas.so on LD_LIBRARY_PATH"},
    {Warning::Kind::kUndecided, "undecided", "run longer: --time 5"},
};

const Entry& entry_of(Warning::Kind kind) {
  for (const Entry& entry : kEntries) {
    if (entry.kind == kind) return entry;
  }
  return kEntries[0];
}

}  // namespace

std::string code_of(Warning::Kind kind) { return entry_of(kind).code; }
std::string remedy_of(Warning::Kind kind) { return entry_of(kind).remedy; }

bool is_load(Warning::Kind kind) {
  return kind == Warning::Kind::kOtherLoad || kind == Warning::Kind::kStolenTime;
}

}  // namespace moire::tool
