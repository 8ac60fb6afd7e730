// What people see: colours, tables, a progress bar. Data goes to stdout, progress and errors to
// stderr.
#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "text.h"

namespace moire::tool {

using Json = nlohmann::ordered_json;

// By the number that selects it.
enum class Colour { kNone = 0, kBold = 1, kDim = 2, kRed = 31, kGreen = 32, kYellow = 33 };

// Coloured if stdout is a terminal and NO_COLOR is not set.
std::string paint(Colour colour, const std::string& s);

// Columns that output may take: COLUMNS, else the terminal's; 0 = any number, where it is piped.
size_t output_width();
// The line broken at spaces to `width` columns (0 = not at all), later lines indented.
std::string wrap(const std::string& line, size_t indent, size_t width = output_width());
// The line on stdout, so broken.
template <class... Parts>
void print_line(size_t indent, const Parts&... parts) {
  std::printf("%s\n", wrap(text(parts...), indent).c_str());
}
// One object a line, at once.
inline void print_json(const Json& object) {
  // What is no UTF-8 in a name becomes U+FFFD.
  std::printf("%s\n", object.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
  std::fflush(stdout);
}
// A problem's line, which is data: broken on a terminal alone, where it can be copied all the same.
std::string wrap_data(const std::string& line);
// "moire: SENTENCE" on stderr.
void print_error(const std::string& sentence);

// Columns aligned to their widest cell, to the right under a heading that begins with '>'. A table
// that is wider than the output leaves out what it may, then breaks the cells of its widest column
// of text.
class Table {
 public:
  explicit Table(std::vector<std::string> heading);
  void add(std::vector<std::string> row);
  // Columns by their headings, the first to go first.
  void may_leave_out(std::vector<std::string> headings) { optional_ = std::move(headings); }
  // Those that do not fit.
  std::vector<std::string> left_out(size_t width = output_width()) const;
  std::string to_string(size_t width = output_width()) const;

 private:
  struct Column {
    size_t index, width;
  };
  std::vector<Column> columns(size_t width) const;

  std::vector<std::vector<std::string>> rows_;
  std::vector<bool> is_right_;  // which columns are numbers
  std::vector<std::string> optional_;
};

// A bar on stderr while it lives; nothing if stderr is no terminal.
class Progress {
 public:
  Progress(std::string label, int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(int64_t done, const std::string& note = "");
  // Makes room for a line of output; the next show() draws again.
  void clear();

 private:
  std::string label_;
  int64_t total_;
  bool is_terminal_;
  double last_shown_ = -1;
};

}  // namespace moire::tool
