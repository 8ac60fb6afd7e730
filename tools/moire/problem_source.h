// Where problems come from: a shipped name, a file, or a literal line.
#pragma once

#include <string>
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

}  // namespace moire::tool
