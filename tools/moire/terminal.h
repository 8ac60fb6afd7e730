// What people see: colours, tables, a progress bar. Data goes to stdout, progress and errors to
// stderr.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moire::tool {

enum class Colour { kNone, kRed, kGreen, kYellow, kBold, kDim };

// Coloured if stdout is a terminal and NO_COLOR is not set.
std::string paint(Colour colour, const std::string& s);

// Columns aligned to their widest cell; the first row is the heading.
class Table {
 public:
  enum class Align { kLeft, kRight };
  Table(std::vector<std::string> heading, std::vector<Align> align);
  void add(std::vector<std::string> row);
  std::string to_string() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::vector<Align> align_;
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

// Seconds of a steady clock.
double now();

}  // namespace moire::tool
