// Memory: the operands' address space. Without backing it hands out addresses alone, so that
// `explain` can lay out a model that the machine could not hold. Guard bytes around every block
// tell whether a call wrote where it must not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moire::tool {

class Memory {
 public:
  enum class Backing {
    kNone,  // addresses that nobody may touch
    kPages  // which cost memory once they are touched
  };
  explicit Memory(Backing backing) : backing_(backing) {}
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Zeroed, 256-byte aligned, named for messages; never null, even for 0 bytes. UsageError where
  // addresses run out, std::bad_alloc where pages do.
  void* take(const std::string& name, int64_t bytes);
  // Of all blocks.
  int64_t bytes() const { return bytes_; }
  // The name of a block whose guards were overwritten, or "".
  std::string first_broken_guard() const;

 private:
  struct Block {
    std::string name;
    unsigned char* data;
    int64_t bytes;
  };
  Backing backing_;
  std::vector<Block> blocks_;
  int64_t bytes_ = 0;
};

}  // namespace moire::tool
