#include "text.h"

#include <algorithm>
#include <cmath>

namespace moire::tool {
namespace {

std::string with_unit(double value, const char* unit) {
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return printed("%.*f%s%s", decimals, value, *unit != 0 ? " " : "", unit);
}

// Letters to insert, drop, replace or swap with their neighbour to make one of the other.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t other = a[i - 1] == b[j - 1] ? 0 : 1;
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + other});
      const bool is_swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (is_swap) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

std::string list_of(std::vector<std::string> words) {
  const std::string last = words.back();
  words.pop_back();
  return text(join(words, ", "), " or ", last);
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  constexpr size_t kLongest = 64;  // of a word that was mistyped
  if (word.empty() || word.size() > kLongest) return "";
  std::string found;
  size_t least = word.size() / 3 + 1;  // a third of the letters may be wrong
  for (const std::string& candidate : candidates) {
    const bool is_begun = word.size() >= 3 && candidate.starts_with(word);
    const std::string head = candidate.substr(0, candidate.find(':'));  // of "zipf:1"
    const size_t letters = is_begun ? 1 : std::min(distance(word, candidate), distance(word, head));
    if (letters < least) {
      least = letters;
      found = candidate;
    }
  }
  return found.empty() ? "" : text("; did you mean ", found, "?");
}

std::string human_bytes(int64_t count) {
  static const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (count < 1024) return std::to_string(count) + " B";
  int unit = 0;
  auto bytes = static_cast<double>(count);
  for (; bytes >= 1024 && unit < 6; ++unit) bytes /= 1024;
  return with_unit(bytes, units[unit]);
}

std::string human_seconds(double seconds) {
  if (seconds < 1e-6) return with_unit(seconds * 1e9, "ns");
  if (seconds < 1e-3) return with_unit(seconds * 1e6, "us");
  if (seconds < 1) return with_unit(seconds * 1e3, "ms");
  return with_unit(seconds, "s");
}

std::string human_number(double value) {
  const bool is_everyday = value == 0 || (std::fabs(value) >= 0.01 && std::fabs(value) < 1e6);
  return is_everyday ? with_unit(value, "") : printed("%.2e", value);
}

}  // namespace moire::tool
