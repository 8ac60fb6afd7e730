#include "problem_source.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "problem_fields.h"
#include "text.h"

namespace moire::tool {
namespace {

// More than any list of problems that somebody wrote.
constexpr size_t kMostBytes = 16 << 20;

std::vector<Problem> load_shipped(const ShippedFile& file, const std::string& which) {
  const std::string path = text("problems/", file.name, ".txt");
  std::vector<Problem> problems = parse_problems(file.text, path);
  if (which.empty()) return problems;
  if (const Problem* found = find_row(problems, &Problem::name, which)) return {*found};
  const std::vector<std::string> names = words_of(problems, &Problem::name);
  throw UsageError(path, ": found no name=", which, ", needed one of ", join(names, ", "),
                   did_you_mean(which, names));
}

// read(), and not an iterator over the buffer: that one throws where a read fails.
std::vector<Problem> load_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string content(kMostBytes + 1, '\0');
  file.read(content.data(), static_cast<std::streamsize>(content.size()));
  if (file.bad() || !file.is_open()) {
    throw UsageError(path, ": found a file that cannot be read");
  }
  content.resize(static_cast<size_t>(file.gcount()));
  if (content.size() > kMostBytes) {
    throw UsageError(path, ": found a file of more than ", kMostBytes >> 20,
                     " MiB, needed one with a problem on each line");
  }
  return parse_problems(content, path);
}

}  // namespace

std::vector<Problem> load_problems(const std::string& what) {
  if (what.find('=') != std::string::npos) return {parse_problem(what)};
  const size_t colon = what.find(':');
  const ShippedFile* const shipped =
      find_row(kShippedFiles, &ShippedFile::name, what.substr(0, colon));
  if (shipped != nullptr) {
    return load_shipped(*shipped, colon == std::string::npos ? "" : what.substr(colon + 1));
  }
  std::error_code no_such_path;
  if (std::filesystem::is_regular_file(what, no_such_path)) return load_file(what);
  const std::vector<std::string> names = words_of(kShippedFiles, &ShippedFile::name);
  throw UsageError("problem \"", what,
                   "\": found no such name or regular file, needed one, a line ",
                   "(groups=8 hidden=64 ffn=32 rows=100), or one of ", join(names, ", "),
                   did_you_mean(what.substr(0, colon), names));
}

Problem with_settings(const Problem& problem, const std::vector<std::string>& settings) {
  const std::string given = text(" ", join(settings, " "));
  const auto sets = [&](std::string_view key) {
    return given.find(text(" ", key, "=")) != std::string::npos;
  };
  const bool resizes = sets("rows") || sets("groups");
  std::string line;
  for (const Field& field : fields()) {
    // A list of splits belongs to the rows and groups that it was written for.
    const bool is_stale =
        field.key == "splits" && resizes && problem.splits.kind == Splits::Kind::kList;
    const std::string value = field.codec.write(problem);
    if (sets(field.key) || value.empty()) continue;
    line += text(field.key, "=", is_stale ? "ragged" : value, " ");
  }
  Problem changed = parse_problem(line + join(settings, " "));
  changed.where = problem.where;
  return changed;
}

}  // namespace moire::tool
