// One entry per field of a problem line: how it is read, printed and explained.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "problem.h"

namespace moire::tool {

struct Field {
  std::string_view key;
  std::string_view values;  // what is accepted, as in "needed ..."
  std::string_view meaning;
  bool is_required;
  bool is_always_printed;
  bool (*read)(std::string_view value, Problem& problem);
  std::string (*write)(const Problem& problem);
};

// "fp32", "bf16", "fp16"; "same" for kNone.
std::string_view dtype_word(DType dtype);
// "mxfp8" and "fp8_block" as well.
std::string_view dtype_word(Format format);
// What `dtype` says of a problem, and "bf16 x mxfp8" where `b` has its own.
std::string dtype_words(const Problem& problem);

// In the order in which they are printed.
const std::vector<Field>& fields();
// Null if there is none.
const Field* find_field(std::string_view key);
// What the field accepts, and which of it was probably meant.
std::string needed(const Field& field, std::string_view found);

}  // namespace moire::tool
