// Name: what a message would call a part of an argument, "outputs[2].offsets", put together without
// the heap, because a check that holds needs it too.
#pragma once

#include <algorithm>
#include <charconv>
#include <concepts>
#include <cstring>
#include <string_view>

namespace moire {

class Name {
 public:
  template <class... Parts>
  explicit Name(const Parts&... parts) {
    (append(parts), ...);
  }
  operator std::string_view() const { return {text_, size_}; }

 private:
  static constexpr size_t kMost = 80;  // longer ones are cut

  void append(std::string_view part) {
    const size_t size = std::min(part.size(), kMost - size_);
    std::memcpy(text_ + size_, part.data(), size);
    size_ += size;
  }
  void append(std::integral auto value) {
    const std::to_chars_result end = std::to_chars(text_ + size_, text_ + kMost, value);
    if (end.ec == std::errc()) size_ = static_cast<size_t>(end.ptr - text_);
  }

  char text_[kMost];
  size_t size_ = 0;
};

}  // namespace moire
