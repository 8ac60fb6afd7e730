// Where problems come from: a shipped name, a file, a literal line, or chance.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "problem.h"

namespace moire::tool {

// A file of the problems folder, compiled into the program.
struct ShippedFile {
  const char* name;  // "qwen3_30b"
  const char* text;
};
extern const std::vector<ShippedFile> kShippedFiles;

// `what` with a '=' is a line, a shipped name its file, else the path of a file. "NAME:CASE" is the
// one line of a shipped file that has name=CASE. As written: sensible() is for what will run.
// UsageError says what it may be.
std::vector<Problem> load_problems(const std::string& what);

// The same problem with some fields changed, as written; `settings` are key=value words.
Problem with_settings(const Problem& problem, const std::vector<std::string>& settings);

// Values to draw from, by field, in the place of the field's own.
using Choices = std::map<std::string_view, std::vector<std::string>>;

// Problem `i` of a seed, for `moire check --random`; the same everywhere. What makes no sense
// beside the other fields is drawn again.
Problem random_problem(uint64_t seed, int64_t i, const Choices& given = {});

}  // namespace moire::tool
