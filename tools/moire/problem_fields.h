// One row per field of a problem line: how it is read, printed and explained.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "problem.h"

namespace moire::tool {

// How a field's value is written.
struct Codec {
  std::string values;  // what is accepted, as in "needed ..."
  std::function<bool(std::string_view value, Problem& problem)> read;
  std::function<std::string(const Problem& problem)> write;
  // What random problems draw from; none where these are numbers.
  std::vector<std::string> samples = {};
};

struct Field {
  enum class Presence {
    kOptional,  // printed where it is not the default
    kPrinted,
    kRequired  // and printed
  };
  std::string_view key;
  Codec codec;
  std::string_view meaning;
  Presence presence = Presence::kOptional;

  bool is_required() const { return presence == Presence::kRequired; }
  // What the field accepts, and which of it was probably meant.
  std::string needed(std::string_view found) const;
};

// The values of `dtype`; the FP8 names stand for BF16 whose products have quantised operands.
const std::vector<std::pair<std::string_view, Format>>& formats();
std::string_view dtype_word(const Format& format);
// What `dtype` says of a problem, and "bf16 x mxfp8" where `b` has its own.
std::string dtype_words(const Problem& problem);

// In the order in which they are printed.
const std::vector<Field>& fields();
// Null if there is none.
const Field* find_field(std::string_view key);

}  // namespace moire::tool
