#include "terminal.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "text.h"

namespace moire::tool {
namespace {

constexpr double kSecondsBetweenUpdates = 0.1;
constexpr int kBarWidth = 30;

bool wants_colour(int descriptor) {
  const char* no_colour = std::getenv("NO_COLOR");
  return isatty(descriptor) != 0 && (no_colour == nullptr || *no_colour == 0);
}

// Columns that a UTF-8 text takes, escape sequences left out.
size_t visible_width(const std::string& s) {
  size_t width = 0;
  for (size_t i = 0; i < s.size(); ++i) {
    if (s[i] == '\033') {
      while (i < s.size() && s[i] != 'm') ++i;
    } else if ((static_cast<unsigned char>(s[i]) & 0xC0U) != 0x80U) {
      ++width;
    }
  }
  return width;
}

}  // namespace

std::string paint(Colour colour, const std::string& s) {
  static const bool is_on = wants_colour(STDOUT_FILENO);
  static const char* const codes[] = {"0", "31", "32", "33", "1", "2"};
  if (!is_on || colour == Colour::kNone) return s;
  return text("\033[", codes[static_cast<int>(colour)], "m", s, "\033[0m");
}

Table::Table(std::vector<std::string> heading, std::vector<Align> align)
    : align_(std::move(align)) {
  rows_.push_back(std::move(heading));
}

void Table::add(std::vector<std::string> row) {
  row.resize(rows_[0].size());
  rows_.push_back(std::move(row));
}

std::string Table::to_string() const {
  std::vector<size_t> widths(rows_[0].size(), 0);
  for (const auto& row : rows_) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], visible_width(row[c]));
  }
  std::string out;
  for (size_t r = 0; r < rows_.size(); ++r) {
    std::string line;
    for (size_t c = 0; c < widths.size(); ++c) {
      const std::string padding(widths[c] - visible_width(rows_[r][c]), ' ');
      const std::string cell = r == 0 ? paint(Colour::kBold, rows_[r][c]) : rows_[r][c];
      line += c == 0 ? "" : "  ";
      line += align_[c] == Align::kRight ? padding + cell : cell + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

Progress::Progress(std::string label, int64_t total)
    : label_(std::move(label)), total_(total), is_terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (!is_terminal_ || last_shown_ < 0) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  last_shown_ = -1;
}

void Progress::show(int64_t done, const std::string& note) {
  if (!is_terminal_) return;
  const double time = now();
  if (last_shown_ >= 0 && time - last_shown_ < kSecondsBetweenUpdates && done < total_) return;
  last_shown_ = time;
  const int filled =
      total_ > 0 ? static_cast<int>(std::min(done, total_) * kBarWidth / total_) : kBarWidth;
  const std::string bar = std::string(static_cast<size_t>(filled), '#') +
                          std::string(static_cast<size_t>(kBarWidth - filled), '.');
  std::fprintf(stderr, "\r\033[K%s [%s] %lld/%lld %s", label_.c_str(), bar.c_str(),
               static_cast<long long>(done), static_cast<long long>(total_), note.c_str());
  std::fflush(stderr);
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace moire::tool
