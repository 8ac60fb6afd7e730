// Text from parts, and the few string helpers of the command line.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace moire::tool {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// As printf writes numbers.
template <class... Values>
std::string printed(const char* format, Values... values) {
  char buffer[128];
  std::snprintf(buffer, sizeof(buffer), format, values...);
  return buffer;
}

inline std::vector<std::string> split(std::string_view s, char separator) {
  std::vector<std::string> parts;
  for (size_t start = 0;;) {
    const size_t end = s.find(separator, start);
    parts.emplace_back(s.substr(start, end - start));
    if (end == std::string_view::npos) return parts;
    start = end + 1;
  }
}

// One member of each row of a table, or what a function says of it.
template <class Rows, class Member>
std::vector<std::string> words_of(const Rows& rows, Member member) {
  std::vector<std::string> words;
  for (const auto& row : rows) words.emplace_back(std::invoke(member, row));
  return words;
}

// The row of a table that has this value; null if there is none.
template <class Row>
const Row* find_row(const std::vector<Row>& rows, auto member, const auto& value) {
  for (const Row& row : rows) {
    if (std::invoke(member, row) == value) return &row;
  }
  return nullptr;
}

// False where the word is not a number of this type, all of it.
template <class T>
bool read_number(std::string_view word, T& out) {
  const char* const end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, out);
  return error == std::errc() && stop == end;
}

inline std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string out;
  for (const std::string& part : parts) {
    if (!out.empty()) out += separator;
    out += part;
  }
  return out;
}

// "fp32, bf16 or fp16"
std::string list_of(std::vector<std::string> words);
// "; did you mean CANDIDATE?", of the one that the word was probably meant to be; "" if none is
// near.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

// "1.50 GiB"
std::string human_bytes(int64_t bytes);
// "12.3 us", "4.56 ms"
std::string human_seconds(double seconds);
// Three significant digits, without an exponent for everyday sizes.
std::string human_number(double value);

}  // namespace moire::tool
