#include "terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "harness.h"

namespace moire::tool {
namespace {

constexpr double kSecondsBetweenUpdates = 0.1;
constexpr int kBarWidth = 30;
constexpr size_t kGap = 2;            // between columns of a table
constexpr size_t kNarrowestText = 8;  // a column of text that is broken

bool wants_colour(int descriptor) {
  const char* no_colour = std::getenv("NO_COLOR");
  return isatty(descriptor) != 0 && (no_colour == nullptr || *no_colour == 0);
}

// COLUMNS, else what the terminal behind the descriptor says; 0 = not known.
size_t width_of(int descriptor) {
  constexpr int64_t kNarrowest = 20, kWidest = 10000;
  const char* given = std::getenv("COLUMNS");
  const int64_t columns = given != nullptr ? std::strtoll(given, nullptr, 10) : 0;
  if (columns >= kNarrowest && columns <= kWidest) return static_cast<size_t>(columns);
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col >= kNarrowest) return size.ws_col;
  return 0;
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

size_t output_width() { return width_of(STDOUT_FILENO); }

std::string paint(Colour colour, const std::string& s) {
  static const bool is_on = wants_colour(STDOUT_FILENO);
  if (!is_on || colour == Colour::kNone) return s;
  return text("\033[", static_cast<int>(colour), "m", s, "\033[0m");
}

std::string wrap(const std::string& line, size_t indent, size_t width) {
  if (width == 0 || visible_width(line) <= width) return line;
  std::string out;
  size_t used = 0;
  for (size_t at = 0; at < line.size();) {
    const size_t word = std::min(line.find_first_not_of(' ', at), line.size());
    const size_t end = std::min(line.find(' ', word), line.size());
    const std::string text = line.substr(word, end - word);
    size_t gap = word - at;
    if (used > indent && used + gap + visible_width(text) > width) {
      out += '\n';
      out.append(indent, ' ');
      used = indent;
      gap = 0;
    }
    out.append(gap, ' ');
    out += text;
    used += gap + visible_width(text);
    at = end;
  }
  return out;
}

std::string wrap_data(const std::string& line) {
  return wrap(line, 4, isatty(STDOUT_FILENO) != 0 ? output_width() : 0);
}

void print_error(const std::string& sentence) {
  const size_t width = isatty(STDERR_FILENO) != 0 ? width_of(STDERR_FILENO) : 0;
  std::fprintf(stderr, "%s\n", wrap("moire: " + sentence, 2, width).c_str());
}

Table::Table(std::vector<std::string> heading) {
  for (std::string& name : heading) {
    is_right_.push_back(name.starts_with('>'));
    if (is_right_.back()) name.erase(0, 1);
  }
  rows_.push_back(std::move(heading));
}

void Table::add(std::vector<std::string> row) {
  row.resize(rows_[0].size());
  rows_.push_back(std::move(row));
}

std::vector<Table::Column> Table::columns(size_t width) const {
  std::vector<Column> columns;
  size_t total = 0;
  for (size_t c = 0; c < is_right_.size(); ++c) {
    size_t widest = 0;
    for (const auto& row : rows_) widest = std::max(widest, visible_width(row[c]));
    columns.push_back({c, widest});
    total += widest + (c == 0 ? 0 : kGap);
  }
  if (width == 0) return columns;
  for (const std::string& heading : optional_) {
    if (total <= width) return columns;
    const auto found = std::find_if(columns.begin(), columns.end(), [&](const Column& column) {
      return rows_[0][column.index] == heading;
    });
    total -= found->width + kGap;
    columns.erase(found);
  }
  if (total <= width) return columns;
  // The first column names the row.
  Column* widest = nullptr;
  for (Column& c : columns) {
    const bool is_text = c.index != 0 && !is_right_[c.index];
    if (is_text && (widest == nullptr || c.width > widest->width)) widest = &c;
  }
  if (widest == nullptr) return columns;
  const size_t excess = total - width;
  widest->width = std::max(widest->width, excess + kNarrowestText) - excess;
  return columns;
}

std::vector<std::string> Table::left_out(size_t width) const {
  std::vector<std::string> out = rows_[0];
  for (const Column& shown : columns(width)) std::erase(out, rows_[0][shown.index]);
  return out;
}

std::string Table::to_string(size_t width) const {
  const std::vector<Column> shown = columns(width);
  std::string out;
  for (size_t r = 0; r < rows_.size(); ++r) {
    std::vector<std::vector<std::string>> cells;  // lines of each
    size_t height = 1;
    for (const Column& c : shown) {
      cells.push_back(split(wrap(rows_[r][c.index], 0, c.width), '\n'));
      height = std::max(height, cells.back().size());
    }
    for (size_t l = 0; l < height; ++l) {
      std::string line;
      for (size_t c = 0; c < shown.size(); ++c) {
        const std::string text = l < cells[c].size() ? cells[c][l] : "";
        const size_t taken = visible_width(text);
        const std::string padding(taken < shown[c].width ? shown[c].width - taken : 0, ' ');
        const std::string cell = r == 0 ? paint(Colour::kBold, text) : text;
        line += c == 0 ? "" : std::string(kGap, ' ');
        line += is_right_[shown[c].index] ? padding + cell : cell + padding;
      }
      line.erase(line.find_last_not_of(' ') + 1);
      out += line + "\n";
    }
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
  const int64_t filled = total_ > 0 ? std::min(done, total_) * kBarWidth / total_ : kBarWidth;
  std::string bar(kBarWidth, '.');
  std::fill_n(bar.begin(), filled, '#');
  std::string line = text(label_, " [", bar, "] ", done, "/", total_, " ", note);
  // A line that wraps cannot be drawn over.
  if (const size_t width = width_of(STDERR_FILENO); width > 0)
    line.resize(std::min(line.size(), width - 1));
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  std::fflush(stderr);
}

}  // namespace moire::tool
