// The closed list of what can be wrong with a measurement; each with its remedy.
#pragma once

#include <string>
#include <vector>

namespace moire::tool {

struct Warning {
  enum class Kind {
    kOtherLoad,
    kStolenTime,
    kClockMoved,
    kOutliers,
    kSpread,
    kFewRounds,
    kInCache,
    kNoBaseline,
    kNoCuBlas,
    kUndecided,
  };
  Kind kind;
  std::string seen;  // with numbers
};

std::string code_of(Warning::Kind kind);  // "other_load"
std::string remedy_of(Warning::Kind kind);
// Whether it says that something else took part of the machine.
bool is_load(Warning::Kind kind);

}  // namespace moire::tool
