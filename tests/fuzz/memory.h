// The memory of one call: blocks between guards, which can be compared with what they held and put
// back. With the address sanitizer, guards may not be read either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace moire::fuzz {

// What a failed comparison says; empty: nothing is wrong.
using Complaint = std::string;

class Memory {
 public:
  // `bytes` of poison (NaN, -1) at an address that is a multiple of `alignment` but not of twice
  // it.
  void* take(const std::string& name, int64_t bytes, int64_t alignment = 8);

  // From here on: what blocks hold now is what they held. And that again.
  void remember();
  void restore();

  // Bytes beside a block changed.
  Complaint damage() const;
  // Bytes of [data, data + bytes) changed.
  bool is_unchanged(const void* data, int64_t bytes) const;

 private:
  struct Block {
    std::string name;
    std::vector<std::byte> storage, remembered;
    size_t begin, bytes;
  };
  static void guard(const Block& block, bool may_be_read);

  std::deque<Block> blocks_;
};

}  // namespace moire::fuzz
